"""Train loopkit learners under Ray Train.

::

    from loopkit_ray import RayReport, resume_from

    def train(config):  # for ray.train.torch.TorchTrainer
        with resume_from() as latest, tempfile.TemporaryDirectory() as directory:
            stack = [DDP(), Checkpoint(directory, resume=latest), RayReport()]
            learner = Learner(model, loss_fn, optimizer, plugins=stack)
            learner.fit(train_data, val_data, epochs=config["epochs"])
"""

from loopkit_ray import _core as _core
from loopkit_ray.report import RayReport
from loopkit_ray.resume import resume_from

__all__ = ["RayReport", "resume_from"]
