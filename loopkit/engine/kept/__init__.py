"""What a run keeps: a part for each thing that is saved, and the search for what is not."""
