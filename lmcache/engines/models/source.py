"""A Hugging Face `config.json`: read, and asked for numbers that must be there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from lmcache.errors import ConfigError
from lmcache.geometry.groups import MAX_LAYERS, MAX_TOKENS

CONFIG = "config.json"

_REMEDY = "give the config.json of a Hugging Face model, or its folder"


@attrs.frozen
class ModelConfig:
    """The numbers of one model."""

    path: Path
    """The file."""
    architecture: str
    """The first of `architectures`: the class that the engine loads."""
    values: Mapping[str, Any]
    """Of the text model, where the file nests one, with what it leaves out taken from the level above."""

    @property
    def name(self) -> str:
        """For people: the name that the file remembers, or its folder's."""
        told = self.values.get("_name_or_path")
        return told if isinstance(told, str) and told else self.path.absolute().parent.name

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, as a positive whole number. Raises ConfigError."""
        name = next((name for name in names if self.values.get(name) is not None), "")
        if not name:
            if default is None:
                raise ConfigError(f"{self.path} does not say {' or '.join(names)}", remedy=_REMEDY)
            return default
        return self.positive(name, self.values[name])

    def positive(self, name: str, value: object) -> int:
        """`value` of the key `name`, if it is a number that a model can have. Raises ConfigError."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_TOKENS:
            raise ConfigError(f"{self.path} says {name} is {value!r}, which is no size", remedy=_REMEDY)
        return value

    def optional(self, name: str) -> int:
        """A whole number that may be missing, null or 0: then 0."""
        return self.positive(name, self.values[name]) if self.values.get(name) else 0

    def flag(self, name: str) -> bool:
        """Whether something is switched on."""
        return bool(self.values.get(name))

    def text(self, name: str, default: str) -> str:
        """A word."""
        value = self.values.get(name)
        return value if isinstance(value, str) else default

    def strings(self, name: str) -> list[str] | None:
        """A list of words, one for each layer; None where it is not there. Raises ConfigError."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{self.path} says {name} is no list of words", remedy=_REMEDY)
        return self.each_layer(name, value)

    def integers(self, name: str) -> list[int] | None:
        """A list of whole numbers; None where it is not there. Raises ConfigError."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) and each >= 0 for each in value):
            raise ConfigError(f"{self.path} says {name} is no list of whole numbers", remedy=_REMEDY)
        return list(value)

    def each_layer(self, name: str, value: list[Any]) -> list[Any]:
        """`value`, if it says something for each layer. Raises ConfigError."""
        if len(value) < self.layers:
            raise ConfigError(f"{self.path} says {name} for {len(value)} of {self.layers} layers", remedy=_REMEDY)
        return value[: self.layers]

    def part(self, name: str) -> "ModelConfig":
        """What is nested below `name`, as a config of its own; empty where it is not there."""
        value = self.values.get(name)
        return attrs.evolve(self, values=value if isinstance(value, dict) else {})

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        count = self.integer("num_hidden_layers")
        if count > MAX_LAYERS:
            raise ConfigError(f"{self.path} says num_hidden_layers is {count}, which is absurd", remedy=_REMEDY)
        return count


def read_config(path: str | Path) -> ModelConfig:
    """Read a `config.json`, or that of a folder. Raises ConfigError, saying which file and what is wrong with it."""
    file = Path(path)
    file = file / CONFIG if file.is_dir() else file
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}", remedy=_REMEDY) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", remedy=_REMEDY) from error
    except ValueError as error:  # of JSON, and of UTF-8
        raise ConfigError(f"{file} is not JSON: {error}", remedy=_REMEDY) from error
    architectures = values.get("architectures") if isinstance(values, dict) else None
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ConfigError(f"{file} names no architectures", remedy=_REMEDY)
    text = values.get("text_config")
    if isinstance(text, dict):
        values = values | {key: value for key, value in text.items() if value is not None}
    return ModelConfig(file, architectures[0], values)
