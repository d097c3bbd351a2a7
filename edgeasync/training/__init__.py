"""What a device runs: trainers, models in plain numpy, and the vectors a device keeps."""
