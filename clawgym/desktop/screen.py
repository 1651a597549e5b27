"""The screen of a desktop: screenshots, settling, mouse and keyboard, without a helper program in the sandbox."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import numpy as np

from clawgym.desktop._keys import keysym_of
from clawgym.desktop._x11 import Rectangle, XClient
from clawgym.errors import SandboxDied, SandboxError

__all__ = ["BUTTONS", "DesktopScreen"]

BUTTONS = {"left": 1, "middle": 2, "right": 3, "up": 4, "down": 5, "back": 6, "forward": 7}
"""Names of pointer buttons; steps of the wheel are buttons too."""

_PRESS_KEY, _RELEASE_KEY, _PRESS, _RELEASE, _MOTION = 2, 3, 4, 5, 6
_SUBSTRUCTURE, _REDIRECT = 0x00080000, 0x00100000
_PROPERTY_CHANGE, _PROPERTY_NOTIFY = 0x00400000, 28
_MOST_WINDOWS = 64
QUIET = 0.012
"""Seconds without a change after which the screen counts as settled, once programs have processed the action."""
_SHIFT = 0xFFE1
_BACKGROUND = 0x3A6EA5
"""Colour of an empty desktop: red, green, blue."""


class DesktopScreen:
    """A connection to the X server of a sandbox, and a copy of its screen; see :meth:`open`."""

    def __init__(self, client: XClient) -> None:
        self._x = client
        setup = client.setup
        self.width, self.height = setup.width, setup.height
        self._pixels = np.zeros((self.height, self.width, 3), dtype=np.uint8)
        self._stale: Rectangle | None = Rectangle(0, 0, self.width, self.height)
        self._changed = 0.0
        """Monotonic time of the last change."""
        self._pongs: dict[int, asyncio.Event] = {}
        self._managed: asyncio.Event | None = asyncio.Event()
        """Whether the window manager has answered; None once it has failed to."""
        self.shown: tuple[int, np.ndarray] | None = None
        """The latest screenshot and its number, for the live view."""

    @classmethod
    async def open(cls, sock: socket.socket) -> DesktopScreen:
        """Connect. Raises :class:`SandboxDied`; then the socket is closed."""
        client = await XClient.connect(sock)
        try:
            screen = cls(client)
            await screen._begin()
        except BaseException:
            await client.aclose()
            raise
        return screen

    async def _begin(self) -> None:
        x = self._x
        root = x.setup.root
        self._test, _ = await x.extension("XTEST")
        damage, first = await x.extension("DAMAGE")
        fixes, _ = await x.extension("XFIXES")
        self._damage, self._fixes = damage, fixes
        await x.ask(struct.pack("<BBHII", damage, 0, 0, 1, 1))
        await x.ask(struct.pack("<BBHII", fixes, 0, 0, 4, 0))
        # A pointer drawn by the server would be reported as damage in the middle of an image.
        x.send(struct.pack("<BBHI", fixes, 29, 0, root))
        self._watched = x.new_id()
        x.on(first, self._on_damage)
        x.on(33, self._on_message)
        x.send(struct.pack("<BBHIIBxxx", damage, 1, 0, self._watched, root, 2))
        x.send(
            struct.pack("<BxHIII", 2, 0, root, 1 << 11, _SUBSTRUCTURE)
        )  # replies to pings are sent to the root window
        self._protocols, self._ping = await x.atom("WM_PROTOCOLS"), await x.atom("_NET_WM_PING")
        self._clients, self._stacking = await x.atom("_NET_CLIENT_LIST"), await x.atom("_NET_CLIENT_LIST_STACKING")
        self._active, self._name = await x.atom("_NET_ACTIVE_WINDOW"), await x.atom("_NET_WM_VISIBLE_NAME")
        self._closes, self._class = await x.atom("_NET_CLOSE_WINDOW"), await x.atom("WM_CLASS")
        self._extents = await x.atom("_NET_REQUEST_FRAME_EXTENTS")
        self._own = x.new_id()  # a window that is never mapped
        x.send(struct.pack("<BBHIIhhHHHHIII", 1, 0, 0, self._own, root, 0, 0, 1, 1, 0, 2, 0, 1 << 11, _PROPERTY_CHANGE))
        x.on(_PROPERTY_NOTIFY, self._on_property)
        x.send(struct.pack("<BxHIII", 2, 0, root, 1 << 1, _BACKGROUND))
        x.send(struct.pack("<BBHIhhHH", 61, 0, 0, root, 0, 0, 0, 0))
        self._keys: dict[int, tuple[int, bool]] = {}
        self._spare: list[int] = []
        for code, syms in enumerate(await x.keys(), x.setup.first_key):
            if not any(syms):
                self._spare.append(code)
            for level, sym in enumerate(syms[:2]):
                if sym:
                    self._keys.setdefault(sym, (code, level == 1))

    # -- screenshots

    async def picture(self, *, pointer: bool = True) -> np.ndarray:
        """A screenshot: a new uint8 array of shape (height, width, 3), RGB.

        Only the parts that changed since the last one are fetched. ``pointer``: whether to draw the pointer.
        """
        stale, self._stale = self._stale, None
        self._forget_damage()
        try:
            if stale is not None:
                data = np.frombuffer(await self._x.image(stale), dtype=np.uint8)
                new = data.reshape(stale.height, stale.width, 4)[:, :, 2::-1]
                self._pixels[stale.y : stale.y + stale.height, stale.x : stale.x + stale.width] = new
        except BaseException:
            self._touch(stale)
            raise
        shown = self._pixels.copy()
        if pointer:
            await self._draw_pointer(shown)
        self.shown = (self.shown[0] + 1 if self.shown else 1, shown)
        return shown

    async def _draw_pointer(self, shown: np.ndarray) -> None:
        answer = await self._x.ask(struct.pack("<BBH", self._fixes, 4, 0), 4 * 256 * 256)
        x, y, width, height, hot_x, hot_y = struct.unpack_from("<hhHHHH", answer, 8)
        if len(answer) != 32 + 4 * width * height:
            raise SandboxDied("the desktop sent a pointer of another size: begin the episode again", cause="protocol")
        at = Rectangle(x - hot_x, y - hot_y, width, height)
        seen = at.within(self.width, self.height)
        if seen is None:
            return
        cursor = np.frombuffer(answer, dtype=np.uint8, offset=32).reshape(height, width, 4)
        top, left = seen.y - at.y, seen.x - at.x
        cursor = cursor[top : top + seen.height, left : left + seen.width]
        under = shown[seen.y : seen.y + seen.height, seen.x : seen.x + seen.width]
        through = 255 - cursor[:, :, 3:].astype(np.uint16)  # colours are premultiplied by alpha
        under[:] = np.minimum(cursor[:, :, 2::-1] + under * through // 255, 255)

    def _on_damage(self, event: bytes) -> None:
        if struct.unpack_from("<I", event, 8)[0] == self._watched:
            self._touch(Rectangle(*struct.unpack_from("<hhHH", event, 16)).within(self.width, self.height))

    def _touch(self, area: Rectangle | None) -> None:
        if area is not None:
            self._stale = area if self._stale is None else self._stale.united(area)
            self._changed = time.monotonic()

    def _forget_damage(self) -> None:
        """Reset damage tracking: the server does not report changes within a region that it has already reported."""
        self._x.send(struct.pack("<BBHIII", self._damage, 3, 0, self._watched, 0, 0))

    # -- settling

    async def settle(self, longest: float = 2.0, quiet: float = QUIET) -> bool:
        """Wait until the programs have processed the action and the screen does not change any more.

        Every window that answers pings (``_NET_WM_PING`` of the Extended Window Manager Hints) is pinged. A program
        processes events in order, so its answer shows that it has processed the action. Then nothing may change for
        ``quiet`` seconds. Returns whether the screen settled within ``longest`` seconds.
        """
        deadline = time.monotonic() + longest
        await self._taken(deadline)
        self._changed = max(self._changed, time.monotonic() - quiet / 2)
        while True:
            while (left := self._changed + quiet - time.monotonic()) > 0:
                if time.monotonic() >= deadline:
                    return False
                self._forget_damage()
                await asyncio.sleep(left)
                await self._x.synchronise()  # all damage so far has been received
            still = self._changed
            await self._taken(deadline)  # ping again: some programs answer before they draw
            if self._changed == still:
                return time.monotonic() < deadline

    async def _taken(self, deadline: float) -> None:
        self._forget_damage()
        await self._x.synchronise()
        windows = [w for w in await self._windows() if self._ping in await self._words(w, self._protocols)]
        pongs = {window: asyncio.Event() for window in windows}
        self._pongs = pongs
        for window in windows:
            message = struct.pack("<BBHIIIII8x", 33, 32, 0, window, self._protocols, self._ping, 0, window)
            self._x.send(struct.pack("<BBHII", 25, 0, 0, window, 0) + message)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0, deadline - time.monotonic())):
                for pong in pongs.values():
                    await pong.wait()
        except TimeoutError:
            return  # the program hangs; so the screenshot is taken as it is
        await self._arranged(deadline)

    async def _arranged(self, deadline: float) -> None:
        """Wait until the window manager has processed the programs' requests.

        It too processes events in order, and is asked for the frame size of an unmapped window.
        """
        if self._managed is None:
            return
        self._managed.clear()
        message = struct.pack("<BBHII20x", 33, 32, 0, self._own, self._extents)
        self._x.send(struct.pack("<BBHII", 25, 0, 0, self._x.setup.root, _SUBSTRUCTURE | _REDIRECT) + message)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0, deadline - time.monotonic())):
                await self._managed.wait()
        except TimeoutError:
            self._managed = None

    async def _windows(self) -> list[int]:
        return (await self._words(self._x.setup.root, self._clients))[:_MOST_WINDOWS]

    async def _words(self, window: int, name: int) -> list[int]:
        data = await self._x.property(window, name)
        return list(struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4]))

    def _on_message(self, event: bytes) -> None:
        kind, first, _, window = struct.unpack_from("<IIII", event, 8)
        if kind == self._protocols and first == self._ping and window in self._pongs:
            self._pongs[window].set()

    def _on_property(self, event: bytes) -> None:
        if struct.unpack_from("<I", event, 4)[0] == self._own and self._managed is not None:
            self._managed.set()

    async def windows(self) -> int:
        """The number of windows of programs; 0 as long as none of them has the keyboard focus."""
        active = await self._words(self._x.setup.root, self._active)
        return len(await self._windows()) if any(active) else 0

    async def count(self) -> int:
        """The number of windows of programs, whether or not one of them has the keyboard focus."""
        return len(await self._windows())

    async def titles(self) -> list[str]:
        """The titles of the programs' windows, from the bottom up."""
        windows = await self._words(self._x.setup.root, self._stacking)
        names = [await self._x.property(window, self._name) for window in windows[:_MOST_WINDOWS]]
        return [name.decode("utf-8", "replace") for name in names]

    async def focus(self, title: str) -> None:
        """Raise the window of this title and give it the keyboard. Raises :class:`SandboxError` if there is none."""
        self._order(self._active, await self._find(title))

    async def close(self, title: str) -> None:
        """Ask the program to close the window of this title. Raises like :meth:`focus`."""
        self._order(self._closes, await self._find(title))

    async def _find(self, title: str) -> int:
        """The uppermost window with this title, else with a title that contains it, else of this class."""
        windows = (await self._words(self._x.setup.root, self._stacking))[:_MOST_WINDOWS][::-1]
        titles = [_plain(await self._x.property(window, self._name)) for window in windows]
        classes = [await self._x.property(window, self._class) for window in windows]
        wanted = _plain(title.encode())
        for fits in (
            [name == wanted for name in titles],
            [wanted in name for name in titles],
            [wanted == _plain(kind.strip(b"\0").replace(b"\0", b".")) for kind in classes],
        ):
            if True in fits:
                return windows[fits.index(True)]
        raise SandboxError(f"no window is called {title[:200]!r}: use one of {titles}")

    def _order(self, what: int, window: int) -> None:
        """Ask the window manager, as a pager does, to do ``what`` with ``window``."""
        message = struct.pack("<BBHIIII12x", 33, 32, 0, window, what, 2, 0)
        self._x.send(struct.pack("<BBHII", 25, 0, 0, self._x.setup.root, _SUBSTRUCTURE | _REDIRECT) + message)

    # -- mouse and keyboard

    def move(self, x: int, y: int) -> None:
        """Move the pointer to a pixel. Raises :class:`SandboxError` outside of the screen."""
        if not (0 <= x < self.width and 0 <= y < self.height):
            raise SandboxError(
                f"({x}, {y}) is outside of the screen of {self.width} x {self.height} pixels: move in it"
            )
        self._fake(_MOTION, 0, x, y)

    async def position(self) -> tuple[int, int]:
        """The pointer's position in pixels."""
        x, y = await self._x.pointer()
        return min(max(x, 0), self.width - 1), min(max(y, 0), self.height - 1)

    def button(self, name: str, down: bool) -> None:
        """Press or release one of :data:`BUTTONS`."""
        self._fake(_PRESS if down else _RELEASE, BUTTONS[name])

    def click(self, name: str = "left", times: int = 1) -> None:
        """Press and release a button ``times`` times."""
        for _ in range(times):
            self.button(name, True)
            self.button(name, False)

    def press(self, keys: list[str]) -> None:
        """Press keys together, such as ``["ctrl", "s"]``. Raises :class:`SandboxError` for an unknown key."""
        codes = [self._key(sym)[0] for sym in map(keysym_of, keys)]
        for code in codes:
            self._fake(_PRESS_KEY, code)
        for code in reversed(codes):
            self._fake(_RELEASE_KEY, code)

    async def type(self, text: str) -> None:
        """Type ``text``. Raises :class:`SandboxError` for a character that cannot be typed."""
        shift = self._key(_SHIFT)[0]
        syms = [keysym_of(character) for character in text]
        for position, sym in enumerate(syms):
            if sym not in self._keys:
                await self.settle(0.5)  # the programs have processed earlier presses of this key
                self._key(sym)
                await self.settle(0.5)  # and know its new meaning
            code, shifted = self._key(sym)
            if shifted:
                self._fake(_PRESS_KEY, shift)
            self._fake(_PRESS_KEY, code)
            self._fake(_RELEASE_KEY, code)
            if shifted:
                self._fake(_RELEASE_KEY, shift)
            if position % 64 == 63:
                await self._x.synchronise()  # bounds the queue of a program that does not read

    def _key(self, sym: int) -> tuple[int, bool]:
        """The key code for ``sym`` and whether it needs shift; a free key is mapped if there is none."""
        found = self._keys.get(sym)
        if found is None:
            if not self._spare:
                raise SandboxError("the keyboard has no free key for it: type fewer different characters at once")
            code = self._spare.pop(0)
            self._spare.append(code)
            self._keys = {known: key for known, key in self._keys.items() if key[0] != code}
            self._x.bind_key(code, sym)
            self._keys[sym] = found = (code, False)
        return found

    def _fake(self, kind: int, detail: int, x: int = 0, y: int = 0) -> None:
        root = self._x.setup.root if kind == _MOTION else 0
        self._x.send(struct.pack("<BBHBBxxII8xhh8x", self._test, 2, 0, kind, detail, 0, root, x, y))

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        await self._x.aclose()


def _plain(title: bytes) -> str:
    """A title for comparison: versions of a program differ in the dash before their name."""
    return title.decode("utf-8", "replace").replace("\u2014", "-").replace("\u2013", "-").casefold()
