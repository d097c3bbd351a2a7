"""Training on devices: trainers, models in numpy, and evaluation."""
