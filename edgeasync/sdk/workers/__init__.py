"""The workers of `train`, by where they run: tasks of this process, processes of this machine, actors on Ray."""
