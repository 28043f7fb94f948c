"""`HostPages`: records which host pages of a group are free, and which handle owns the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int64]


class HostPages:
    """Host pages of one group, numbered from 0.

    Attributes:
        num_pages: all pages.
        num_free: free pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages
        self._owners = np.zeros(num_pages, np.int64)  # the number of each page's handle; 0 = free

    def take(self, num_pages: int, owner: int) -> Pages:
        """Give `num_pages` free pages, ascending, to the handle `owner`; that many must be free."""
        pages = np.flatnonzero(self._owners == 0)[:num_pages]
        self._owners[pages] = owner
        self.num_free -= num_pages
        return pages

    def give_back(self, pages: Pages) -> None:
        """Free a handle's pages."""
        self._owners[pages] = 0
        self.num_free += len(pages)

    def reset(self, pages_held: dict[int, Pages]) -> None:
        """Set the owners to `pages_held`, handle number -> pages; all other pages become free."""
        self._owners[:] = 0
        for number, pages in pages_held.items():
            self._owners[pages] = number
        self.num_free = int((self._owners == 0).sum())

    def findings(self, pages_held: dict[int, Pages]) -> list[str]:
        """Compare the records with `pages_held`, handle number -> pages; return the faults."""
        owners = np.zeros_like(self._owners)
        findings = []
        for number, pages in pages_held.items():
            if owners[pages].any() or len(np.unique(pages)) < len(pages):
                findings.append(f"host pages of handle {number} are held twice")
            owners[pages] = number
        for page in np.flatnonzero(owners != self._owners).tolist():
            findings.append(f"host page {page} is {self._owners[page]}'s, held by {owners[page]}")
        if self.num_free != (num_free := int((self._owners == 0).sum())):
            findings.append(f"{self.num_free} host pages are counted as free, {num_free} are")
        return findings
