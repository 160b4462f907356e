"""Data: named sets with checked files, tables of one's own, and random changes to images."""

from covary.data.augment import augmented, horizontal_flip, random_crop
from covary.data.catalogue import SetEntry
from covary.data.dataset import DataError, Dataset
from covary.data.new_images import ImageSchema, read_images, read_png
from covary.data.rows import Chunk, read_rows
from covary.data.schema import Column, Schema
from covary.data.store import Status, describe, fetch, load, names, status
from covary.data.tables import read_table

__all__ = [
    "Chunk",
    "Column",
    "DataError",
    "Dataset",
    "ImageSchema",
    "Schema",
    "SetEntry",
    "Status",
    "augmented",
    "describe",
    "fetch",
    "horizontal_flip",
    "load",
    "names",
    "random_crop",
    "read_images",
    "read_png",
    "read_rows",
    "read_table",
    "status",
]
