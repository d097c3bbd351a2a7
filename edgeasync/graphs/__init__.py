"""Model files: conversion of ONNX to training graphs, their cache, evaluation and export."""
