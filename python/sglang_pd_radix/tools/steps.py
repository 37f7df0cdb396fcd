"""Progress of a command of several steps, on stderr."""

from __future__ import annotations


class Steps:
    """On a terminal one line that changes and one that stays for each finished step; elsewhere a line for each step."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.text import Text

        self._text = Text
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> Steps:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def now(self, text: str) -> None:
        """What is being done."""
        if self._status:
            self._status.update(self._text(text))
        else:
            self._line(f"  {text}")

    def done(self, text: str) -> None:
        """What has been done."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
