"""Named algorithms: what a name stands for, what it reads, and which options it takes."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from siirl.errors import ConfigError


class Named(Protocol):
    """What a registry holds: a function under a name."""

    @property
    def name(self) -> str: ...

    @property
    def fn(self) -> Callable[..., Any]: ...


Spec = TypeVar("Spec", bound=Named)


class Registry(Generic[Spec]):
    """Specs by name. `kind` and `key` (the config key that picks one) appear in error messages."""

    def __init__(self, kind: str, key: str) -> None:
        self.kind = kind
        self.key = key
        self._specs: dict[str, Spec] = {}

    def add(self, spec: Spec) -> None:
        """Register a spec. ConfigError if its name is taken by another function."""
        taken = self._specs.get(spec.name)
        if taken is not None and taken.fn is not spec.fn:
            raise ConfigError(
                f"{self.kind} {spec.name!r} is already registered, "
                f"by {taken.fn.__module__}.{taken.fn.__name__}: a name stands for one function."
            )
        self._specs[spec.name] = spec

    def get(self, name: str) -> Spec:
        """The spec of a name. ConfigError with the known names if there is none."""
        if name in self._specs:
            return self._specs[name]
        close = difflib.get_close_matches(name, self._specs, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"{self.key}={name!r} is not a known {self.kind}: known are {', '.join(self._specs)}.{hint}"
        )

    def resolve(self, name: str, load: Callable[[str], Any]) -> str:
        """The registered name of the user's function that "file.py:fn" names; another name as it is.

        load imports the function, which registers it. ConfigError if it registers nothing.
        """
        if ":" not in name:
            return name
        fn = load(name)
        found = next((known for known, spec in self._specs.items() if spec.fn is fn), None)
        if found is None:
            raise ConfigError(
                f"{self.key}={name}: the function is not registered as {self.kind}. Decorate it."
            )
        return found

    def names(self) -> tuple[str, ...]:
        """All registered names, in the order of registration."""
        return tuple(self._specs)


def option_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The keyword-only parameters of a function: the scalars that it takes from the configuration."""
    parameters = inspect.signature(fn).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def pick_options(name: str, fn: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Of all options offered, those that `fn` takes. ConfigError if one without a default is not offered."""
    parameters = inspect.signature(fn).parameters
    picked = {key: options[key] for key in option_names(fn) if key in options}
    missing = [
        key
        for key in option_names(fn)
        if key not in picked and parameters[key].default is inspect.Parameter.empty
    ]
    if missing:
        raise ConfigError(
            f"{name!r} takes the option {missing[0]!r}, which is not among those given "
            f"({', '.join(options)}). Give it, or give the function a default for it."
        )
    return picked
