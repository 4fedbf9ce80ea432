"""From and to other formats: a file per format, each with a function that reads or writes episodes."""

from qfleet.datasets.convert.importer import Importer, import_dataset, make_importer

__all__ = ["Importer", "import_dataset", "make_importer"]
