"""Model files: conversion of ONNX models to training graphs, graph cache, evaluation and export."""
