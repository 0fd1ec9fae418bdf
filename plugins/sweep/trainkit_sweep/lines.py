"""Lines that are added to a file of JSON objects, such as the metrics of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from trainkit.errors import DataError


class AddedLines:
    """Reads the JSON objects that are added to a file of lines. It begins again if the file is replaced or shorter."""

    def __init__(self, path: Path) -> None:
        self.path, self._file, self._read = path, -1, 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the objects since the last call, and whether those of earlier calls do not count any more.

        Raises:
            DataError: the file cannot be read, or a line is not a JSON object; names the file.
        """
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                anew = about.st_ino != self._file or about.st_size < self._read
                file.seek(0 if anew else self._read)
                added = file.read()
        except FileNotFoundError:
            return [], False
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error}") from error
        whole = added[: added.rfind(b"\n") + 1]
        self._file, self._read = about.st_ino, len(whole) + (0 if anew else self._read)
        try:
            return [dict(json.loads(line)) for line in whole.splitlines()], anew
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{self.path}: a line is not a JSON object ({error})") from error
