"""Options that several commands share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from jax.sharding import Mesh
from tyro.conf import arg

from dspark_jax import chat
from dspark_jax.assets import TINY_V4
from dspark_jax.checkpoint.load import Progress, load
from dspark_jax.decoding.request import SETTINGS, Request
from dspark_jax.model.model import Model
from dspark_jax.model.numerics import Numerics, numerics_of
from dspark_jax.sharding import make_mesh


@dataclass(frozen=True)
class Devices:
    """Over which devices the model is split."""

    data: Annotated[int, arg(metavar="N")] = 1
    """Groups of devices, each with a whole model and its share of the sequences."""
    expert: Annotated[int, arg(metavar="N")] = 1
    """Ways to split the routed experts."""
    tensor: Annotated[int, arg(metavar="N")] = 1
    """Ways to split everything large, routed experts included."""

    def mesh(self) -> Mesh | None:
        """None for one device."""
        sizes = (self.data, self.expert, self.tensor)
        return make_mesh(*sizes) if sizes != (1, 1, 1) else None


ONE_DEVICE = Devices()


@dataclass(frozen=True)
class Loading:
    """Which model, and where it lies."""

    checkpoint: Annotated[Path, arg(metavar="DIR", help_behavior_hint="(default: the packaged tiny-v4)")] = TINY_V4
    """Folder with config.json, the index and the shards."""
    numerics: Literal["float32", "bfloat16", "official"] = "bfloat16"
    """float32 for parity with PyTorch, official to quantise activations as DeepSeek serves the model."""

    no_kernels: bool = False
    """Run everything through XLA, on GPUs that have kernels for it, too."""

    @property
    def preset(self) -> Numerics:
        """What the options say of numbers."""
        return replace(numerics_of(self.numerics), implementation="xla" if self.no_kernels else None)

    def model(self, devices: Devices, progress: Progress) -> Model:
        """Loads it."""
        return load(self.checkpoint, self.preset, devices.mesh(), progress=progress)


@dataclass(frozen=True)
class Drafting(Loading):
    """Which target and which drafter."""

    drafter: Annotated[Path | None, arg(metavar="FILE.gguf", help_behavior_hint="(default: the folder's)")] = None
    """GGUF file of llama.cpp or ds4 to take the drafter from."""

    def model(self, devices: Devices, progress: Progress) -> Model:
        """Loads both."""
        return load(self.checkpoint, self.preset, devices.mesh(), progress=progress, drafter=self.drafter)


PACKAGED = Loading()
PACKAGED_PAIR = Drafting()


@dataclass(frozen=True)
class Answering:
    """How prompts are completed."""

    max_new_tokens: Annotated[int, arg(metavar="N")] = Request.max_new_tokens
    """Tokens to generate at most; the model's end-of-sequence token stops earlier."""
    temperature: Annotated[float, arg(metavar="T")] = Request.temperature
    """0 decodes greedily."""
    top_p: Annotated[float, arg(metavar="P")] = Request.top_p
    """Samples from the likeliest tokens that together have this share."""
    top_k: Annotated[int, arg(metavar="K", help_behavior_hint="(default: all)")] = Request.top_k
    """Samples from the K likeliest tokens."""
    seed: Annotated[int, arg(metavar="S")] = Request.seed
    """The same prompt and seed draw the same random numbers in any batch."""
    samples: Annotated[int, arg(metavar="N")] = 1
    """Completions of each prompt, with seeds made of S; those that start together share its prefill."""
    draft_tokens: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: the trained block)")] = None
    """Drafts offered in a round; 0 decodes plainly. Greedy tokens are the same whatever it is."""
    greedy_drafts: bool = Request.greedy_drafts
    """Let the drafter propose its likeliest tokens instead of drawing them: the same distribution, fewer accepted."""
    thinking: Annotated[chat.Thinking, arg(help_behavior_hint="(default: high)")] = "high"
    """How long the model reasons before it answers messages."""

    def settings(self) -> dict[str, Any]:
        """Those of every request, by the names of `Request`."""
        return {name: getattr(self, name) for name in SETTINGS if hasattr(self, name)}


@dataclass(frozen=True)
class Decoding(Answering):
    """How prompts are completed, and what is recorded."""

    logprobs: bool = False
    """Record log-probabilities of the new tokens (JSON)."""


UNLESS_ASKED = Decoding()
