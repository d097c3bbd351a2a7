"""Datasets, loaders and transforms. Nothing is downloaded: files are read where they lie."""

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
