"""From the plugins of a learner to the plan of its calls."""
