"""The images among tokens: which, and where those of each begin."""

from typing import NamedTuple


class Seen(NamedTuple):
    """Images, in the order of their tokens. All other tokens are text, also those of the image's number."""

    images: tuple[str, ...] = ()
    """In base64."""
    starts: tuple[int, ...] = ()
    """The place of the first token of each."""

    def after(self, num_tokens: int) -> "Seen":
        """The same behind so many tokens more."""
        return Seen(self.images, tuple(start + num_tokens for start in self.starts))

    def joined(self, other: "Seen") -> "Seen":
        """Both, the other behind."""
        return Seen(self.images + other.images, self.starts + other.starts)

    def before(self, num_tokens: int) -> "Seen":
        """Those among the first tokens."""
        count = sum(start < num_tokens for start in self.starts)
        return Seen(self.images[:count], self.starts[:count])

    def since(self, num_tokens: int) -> "Seen":
        """Those behind the first tokens, counted from there."""
        count = sum(start < num_tokens for start in self.starts)
        return Seen(self.images[count:], self.starts[count:]).after(-num_tokens)


NO_IMAGES = Seen()
