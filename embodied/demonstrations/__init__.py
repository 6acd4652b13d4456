"""Recorded episodes in LeRobot's dataset layout: version 3.0 written, 3.x, 2.1 and 2.0 read for supervised learning.

from embodied.demonstrations import Dataset
dataset = Dataset("demos/reach")
batch = dataset.batch([0, 17, 42], chunk=8)      # batch.actions [3, 8, A], batch.padding [3, 8], batch.inputs()
"""

from __future__ import annotations

from embodied.demonstrations.data_files import RecordedEpisode
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.demonstrations.reader import Batch, Dataset, History
from embodied.demonstrations.writer import DatasetWriter, FileSizes

__all__ = ["Batch", "Dataset", "DatasetError", "DatasetWriter", "Feature", "FileSizes", "History", "RecordedEpisode"]
