"""Datasets, loaders and transforms. Files are read in place; nothing is downloaded."""

from edgeasync.async_train.data import transforms
from edgeasync.async_train.data.convert import as_dataset, batch_size_of
from edgeasync.async_train.data.images import ImageFolder, ImageNet
from edgeasync.async_train.data.loader import DataLoader, Subset
from edgeasync.async_train.data.mnist import MNIST

__all__ = [
    "MNIST",
    "DataLoader",
    "ImageFolder",
    "ImageNet",
    "Subset",
    "as_dataset",
    "batch_size_of",
    "transforms",
]
