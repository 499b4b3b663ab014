"""A completion of DeepSeek-V4 back to a message."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tokenizers import Tokenizer

from dspark_jax.chat import recipe
from dspark_jax.chat.messages import Message, ToolCall, to_json
from dspark_jax.chat.prompt import Thinking
from dspark_jax.chat.recipe import DSML, EOS, THINK_END
from dspark_jax.errors import RequestError

_CALLS_START = f"\n\n<{DSML}tool_calls"
_TEXT = rf"((?:(?!{DSML}).)*?)"
_INVOKE = re.compile(rf'<{DSML}invoke name="{_TEXT}">\n', re.DOTALL)
_PARAMETER = re.compile(
    rf'<{DSML}parameter name="{_TEXT}" string="(true|false)">{_TEXT}</{DSML}parameter>\n', re.DOTALL
)
_INVOKE_END = re.compile(rf"</{DSML}invoke>\n")
_EMPTY_INVOKE_END = re.compile(rf"\n?</{DSML}invoke>\n")
_CONTROL = ("<｜begin▁of▁sentence｜>", EOS, "<think>", THINK_END, DSML)


@dataclass(frozen=True)
class Answer:
    """What the model answered.

    Attributes:
        content: the text for the user.
        reasoning_content: what it thought before; empty without thinking.
        tool_calls: in the model's order. Their arguments are as the model wrote them, which may be no JSON.
        finish_reason: whether it called tools. Whether the length cut it short is known to the caller of the model.
    """

    content: str
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def to_message(self) -> Message:
        """The assistant message with which the dialogue goes on."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        message |= {"reasoning_content": self.reasoning_content} if self.reasoning_content else {}
        return message | ({"tool_calls": calls} if calls else {})


def parse(ids: Sequence[int], tokenizer: Tokenizer, *, thinking: Thinking, strict: bool = False) -> Answer:
    """The answer in a completion's token ids, up to the end token if there is one.

    Args:
        ids: what the model generated after a prompt of `encode`. Of a continued message, the part before may be put in
            front, from behind the generation prompt on.
        tokenizer: of the model.
        thinking: that of the prompt.
        strict: refuse what the format does not allow, instead of making the best of it.

    Raises:
        RequestError: a strict reading fails, or `deepseek-recipe`, which reads tolerantly, is not installed.
    """
    return parse_text(tokenizer.decode(list(ids), skip_special_tokens=False), thinking=thinking, strict=strict)


def parse_text(completion: str, *, thinking: Thinking, strict: bool = False) -> Answer:
    """The answer in a completion's text, its control tokens spelled out; arguments and errors are those of `parse`."""
    if thinking not in get_args(Thinking):
        raise RequestError(f"thinking is {thinking!r}; expected one of {', '.join(get_args(Thinking))}.")
    read = _read_strictly if strict else _read
    return read(completion, thinking != "off")


def _read(completion: str, thinking: bool) -> Answer:
    choice = recipe.read_answer(completion.partition(EOS)[0], thinking)
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Answer(
        content=message.get("content") or "",
        reasoning_content=message.get("reasoning_content") or "",
        tool_calls=tuple(ToolCall(call["name"], call["arguments"], f"call_{i}") for i, call in enumerate(calls)),
        finish_reason=choice["finish_reason"],
    )


def _read_strictly(completion: str, thinking: bool) -> Answer:
    """The grammar of `parse_message_from_completion_text` in the checkpoints' encoding file."""
    reasoning, rest = "", completion
    if thinking:
        reasoning, end, rest = completion.partition(THINK_END)
        if not end or _CALLS_START in reasoning:
            raise RequestError(
                f"the completion has no {THINK_END} that ends its reasoning; parse it with strict=False."
            )
    body, eos, surplus = rest.partition(EOS)
    content, start, block = body.partition(_CALLS_START)
    if surplus or not (eos or start):
        fault = f"goes on after {EOS}" if surplus else f"does not end in {EOS}"
        raise RequestError(f"the completion {fault}; parse it with strict=False.")
    for spelling in _CONTROL:
        if spelling in reasoning or spelling in content:
            raise RequestError(f"the completion has a {spelling} that is out of place; parse it with strict=False.")
    calls = _read_calls(block) if start else ()
    return Answer(content, reasoning, calls, "tool_calls" if calls else "stop")


def _read_calls(block: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    at = len(">\n") if block.startswith(">\n") else 0
    while invoke := _INVOKE.match(block, at):
        at = invoke.end()
        arguments: dict[str, str] = {}
        while parameter := _PARAMETER.match(block, at):
            at = parameter.end()
            name, is_text, value = parameter.groups()
            if name in arguments:
                raise RequestError(f"the call of {invoke[1]} has {name} twice; parse it with strict=False.")
            arguments[name] = to_json(value) if is_text == "true" else value
        end = (_INVOKE_END if arguments else _EMPTY_INVOKE_END).match(block, at)
        if end is None:
            break
        at = end.end()
        pairs = ", ".join(f"{to_json(name)}: {value}" for name, value in arguments.items())
        calls.append(ToolCall(invoke[1], f"{{{pairs}}}", f"call_{len(calls)}"))
    if at == 0 or block[at:] != f"</{DSML}tool_calls>":
        raise RequestError(
            f"the completion's calls are malformed at {block[at : at + 40]!r}, after {len(calls)} whole ones; parse it "
            "with strict=False."
        )
    return tuple(calls)
