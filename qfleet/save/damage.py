"""Errors of saved files that cannot be used."""

from qfleet.errors import NoCheckpointError


class Damaged(NoCheckpointError):
    """A saved file or checkpoint is not what was written."""

    def __init__(self, where: str, *problems: str) -> None:
        super().__init__(
            f"{where} is damaged: {'; '.join(problems)}.",
            "Its bytes are not the ones qfleet wrote, so nothing in it can be trusted.",
            "Resume without --strict to go on from an older one, or run `qfleet verify RUN` to see which are whole.",
        )
        self.problems = list(problems)


class NewerFormat(NoCheckpointError):
    """A whole checkpoint that this version cannot read."""

    def __init__(self, format_version: int, written_by: str | None) -> None:
        super().__init__(
            f"The checkpoint has format {format_version}: it was written by a newer qfleet.",
            "This version does not know what that format means, and guessing could lose training.",
            f"Install version {written_by or 'newest'} of qfleet and resume again.",
        )
