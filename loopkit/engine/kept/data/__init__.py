"""What is saved of the data of a run, and how a resumed run knows them again."""
