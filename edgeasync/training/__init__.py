"""Training on devices: trainers, numpy models, and the vectors that a device keeps."""
