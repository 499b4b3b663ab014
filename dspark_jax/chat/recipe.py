"""The one place that knows DeepSeek's package `deepseek-recipe`: what it renders, as text with marked tokens."""

import importlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from dspark_jax.chat.messages import ToolCall, Turn, to_json
from dspark_jax.errors import RequestError

Effort = Literal["low", "high", "max"]
"""The package's levels: no text, the text of 0731's high, the text of 0731's max."""

DSML = "｜DSML｜"
EOS = "<｜end▁of▁sentence｜>"
THINK_END = "</think>"


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        text: all of it, control tokens spelled out.
        special: ranges of `text` that are control tokens, ascending and disjoint. The same spelling elsewhere is text.
    """

    text: str
    special: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: "Prompt") -> "Prompt":
        return joined([self, other])

    def part(self, start: int, stop: int | None = None) -> "Prompt":
        """Characters `start` to `stop`, which must cut no token."""
        stop = len(self.text) if stop is None else stop
        inside = tuple((a - start, b - start) for a, b in self.special if start <= a and b <= stop)
        return Prompt(self.text[start:stop], inside)

    def insert(self, at: int, other: "Prompt") -> "Prompt":
        """The prompt with another one put in before character `at`."""
        return self.part(0, at) + other + self.part(at)


def joined(prompts: Iterable[Prompt]) -> Prompt:
    """Prompts one after the other."""
    texts, special, length = [], [], 0
    for prompt in prompts:
        texts.append(prompt.text)
        special += [(start + length, stop + length) for start, stop in prompt.special]
        length += len(prompt.text)
    return Prompt("".join(texts), tuple(special))


def token(text: str) -> Prompt:
    """A control token."""
    return Prompt(text, ((0, len(text)),))


def package() -> ModuleType:
    """The package.

    Raises:
        RequestError: it is not installed.
    """
    try:
        return importlib.import_module("deepseek_recipe")
    except ModuleNotFoundError as error:
        raise RequestError(
            "chat needs the package deepseek-recipe, which is not installed; run: pip install 'dspark-jax[chat]'."
        ) from error


def render(turns: Sequence[Turn], effort: Effort | None, tools: bool = False) -> Prompt:
    """What the package renders: effort text, turns, and the generation prompt unless the last turn is unfinished.

    Args:
        turns: without their tools, response formats and tasks.
        effort: None without thinking, and then without any reasoning.
        tools: declare one tool, after the system text. With a tool the package keeps the reasoning of every turn, and
            without one it drops that before the last user turn.
    """
    recipe = package()
    conversation = recipe.Conversation(
        [_message(recipe, turn, effort) for turn in turns],
        thinking_mode=effort is not None,
        reasoning_effort=effort,
        tools=[recipe.ToolDefinition(_TOOL["name"])] if tools else None,
    )
    return _respell_calls(_rendered(recipe, conversation), turns)


def _rendered(recipe: ModuleType, conversation: Any) -> Prompt:
    rendered = recipe.DeepseekV4Encoding().render_conversation(conversation)
    return Prompt(rendered.prompt, tuple(rendered.special_ranges))


def _message(recipe: ModuleType, turn: Turn, effort: Effort | None) -> Any:
    match turn.role:
        case "system":
            return recipe.SystemMessage(turn.content)
        case "latest_reminder":
            return recipe.LatestReminderMessage(turn.content)
        case "tool":
            return recipe.ToolMessage(turn.content, turn.tool_call_id)
        case "assistant":
            calls = [recipe.ToolCall(call.id, call.name, _texts_only(call)) for call in turn.tool_calls]
            reasoning = None if effort is None else turn.reasoning_content
            return recipe.AssistantMessage(turn.content, reasoning, calls or None, prefix=turn.unfinished)
        case _:  # a developer turn is a user turn with tools
            return recipe.UserMessage(turn.content)


def _respell_calls(prompt: Prompt, turns: Sequence[Turn]) -> Prompt:
    """Calls as the encoding file spells them, where the package does otherwise."""
    arguments = deque(item for turn in turns for call in turn.tool_calls for item in _arguments(call).items())
    ends = [*(start for start, _ in prompt.special[1:]), len(prompt.text)]
    pieces = []
    for (start, stop), end in zip(prompt.special, ends, strict=True):  # the first token is at the front
        spelling, following = prompt.text[start:stop], prompt.text[stop:end]
        pieces += [token(spelling), Prompt(_respell(following, arguments) if spelling == DSML else following)]
    return joined(pieces)


def _respell(tag: str, arguments: deque[tuple[str, Any]]) -> str:
    """What follows a DSML token: an empty line in a call without arguments, values as Python writes their JSON."""
    if tag.startswith("invoke name=") and tag.endswith('">\n</'):
        return tag.removesuffix("</") + "\n</"
    if arguments:
        name, value = arguments[0]
        opening = f'parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        if tag.startswith(opening):  # not the parameter in the text that declares tools
            arguments.popleft()
            return tag if isinstance(value, str) else f"{opening}{to_json(value)}</"
    return tag


def _texts_only(call: ToolCall) -> str:
    """Arguments for the package, without numbers that it would write in another way or not take at all."""
    return to_json({name: value if isinstance(value, str) else None for name, value in _arguments(call).items()})


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments: dict[str, Any] = json.loads(call.arguments)
    except json.JSONDecodeError:
        return {"arguments": call.arguments}
    return arguments


_TOOL = {"name": "tool", "description": "", "parameters": None}  # as the package writes a tool with only a name


def tools_block(tools: Sequence[dict[str, Any]] = (_TOOL,)) -> Prompt:
    """The fixed text that declares tools, with one line of JSON for each, as their caller ordered the keys."""
    block = _block(render([], "low", tools=True))
    start = block.text.index(to_json(_TOOL))
    lines = Prompt("\n".join(map(to_json, tools)))
    return block.part(0, start) + lines + block.part(start + len(to_json(_TOOL)))


def response_format_block(response_format: dict[str, Any]) -> Prompt:
    """The fixed text that asks for a format, and the format."""
    recipe = package()
    conversation = recipe.Conversation([], reasoning_effort="low", response_schema={})
    return Prompt(_block(_rendered(recipe, conversation)).text.removesuffix("{}") + to_json(response_format))


def _block(prompt: Prompt) -> Prompt:
    """What stands between the first token and the two of the generation prompt."""
    return prompt.part(prompt.special[0][1], prompt.special[-2][0])


def read_answer(completion: str, thinking: bool) -> dict[str, Any]:
    """The package's tolerant reading of a completion without its end token: a choice of a Chat Completions response."""
    recipe = package()
    version = recipe.ModelVersion.DeepseekV4Pro  # the package's name for the V4 format
    request = recipe.ConversationRequest(recipe.Conversation([], thinking_mode=thinking), version)
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    stream = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, id="", model=""),
        recipe.ParsingOptions(thinking_initial_stage=stage),
    )
    response = recipe.ChatCompletionResponse(id="", model="", created=0, prompt_tokens=0, prompt_cache_hit_tokens=0)
    stop = recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)
    for chunk in [*stream.push(recipe.InferenceChunk.text(completion)), *stream.push(stop), *stream.finish()]:
        response.accumulate(chunk)
    choice: dict[str, Any] = json.loads(response.to_json())["choices"][0]
    return choice
