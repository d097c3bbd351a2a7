"""The workers of `train`: tasks of this process, processes of this machine, or Ray actors."""
