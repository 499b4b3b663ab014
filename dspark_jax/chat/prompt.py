"""Messages to the prompt that DeepSeek-V4 was trained on, and to its token ids."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from tokenizers import Tokenizer

from dspark_jax.chat import recipe
from dspark_jax.chat.messages import Message, Turn, name_of, with_tools
from dspark_jax.chat.order import read_turns
from dspark_jax.chat.recipe import Effort, Prompt
from dspark_jax.chat.release import Release
from dspark_jax.errors import RequestError

Thinking = Literal["off", "low", "high", "max"]
SpecialInContent = Literal["text", "tokens"]

# The package's effort for each level of thinking. What the preview calls max, 0731 calls high.
EFFORTS: dict[Release, dict[Thinking, Effort | None]] = {
    "0731": {"off": None, "low": "low", "high": "high", "max": "max"},
    "preview": {"off": None, "high": "low", "max": "high"},
}


def encode(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    thinking: Thinking = "high",
    tools: Sequence[dict[str, Any]] = (),
    drop_thinking: bool = True,
    generation_prompt: bool = True,
    special_in_content: SpecialInContent = "text",
    release: Release = "0731",
) -> list[int]:
    """Token ids of a dialogue, the first token of every prompt included.

    Args:
        messages: in OpenAI's form, with the roles system, user, assistant, tool, latest_reminder and developer; the
            last one may be an assistant message to continue (`prefix` or `wo_eos` true). See `messages.py`.
        tokenizer: of DeepSeek-V4.
        thinking: off, or how much; DeepSeek's own service defaults to high.
        tools: declared in the system message, as if it carried them.
        drop_thinking: leave the reasoning of turns before the last user turn out, unless tools are declared.
        generation_prompt: False for a dialogue that ends in a finished answer, as training data does.
        special_in_content: what a control token spelled inside a message is. "text" is right for content of others;
            "tokens" is what encoding the rendered string does, and lets a user message open a turn of its own.
        release: whose names of the levels `thinking` uses; `release_of` finds it.

    Raises:
        RequestError: the messages make no dialogue that the model was trained on, an argument is none of its values,
            the tokenizer is of another model, or `deepseek-recipe` is not installed.
    """
    if special_in_content not in get_args(SpecialInContent):
        raise RequestError(f'special_in_content is {special_in_content!r}; expected "text" or "tokens".')
    turns = _turns(messages, tools, generation_prompt)
    prompt = _dialogue(turns, _effort(thinking, release), drop_thinking)
    if special_in_content == "tokens":
        return list(tokenizer.encode(prompt.text, add_special_tokens=False).ids)
    return _encode_parts(prompt, tokenizer)


def render(
    messages: Sequence[Message],
    *,
    thinking: Thinking = "high",
    tools: Sequence[dict[str, Any]] = (),
    drop_thinking: bool = True,
    generation_prompt: bool = True,
    release: Release = "0731",
) -> str:
    """The text that `encode` encodes, its control tokens spelled out; arguments and errors are those of `encode`."""
    turns = _turns(messages, tools, generation_prompt)
    return _dialogue(turns, _effort(thinking, release), drop_thinking).text


def _effort(thinking: Thinking, release: Release) -> Effort | None:
    if not isinstance(release, str) or release not in EFFORTS:
        raise RequestError(f"release is {release!r}; expected one of {', '.join(EFFORTS)}.")
    levels = EFFORTS[release]
    if not isinstance(thinking, str) or thinking not in levels:
        raise RequestError(f"thinking is {thinking!r}; the release {release} knows {', '.join(levels)}.")
    return levels[thinking]


def _turns(messages: Sequence[Message], tools: Sequence[dict[str, Any]], generation_prompt: bool) -> list[Turn]:
    turns = read_turns(with_tools(messages, tools))
    if turns[-1].finished and not turns[-1].task and generation_prompt:
        raise RequestError(
            f"message {len(turns) - 1} (assistant): is a finished answer, after which there is nothing to generate; "
            'add a user message, give it "prefix": true to continue it, or ask for no generation prompt.'
        )
    if not generation_prompt and not (turns[-1].finished and not turns[-1].task):
        raise RequestError(
            f"message {len(turns) - 1} ({turns[-1].role}): without a generation prompt a dialogue ends in a finished "
            "assistant message; add the answer, or ask for the generation prompt."
        )
    return turns


def _dialogue(turns: list[Turn], effort: Effort | None, drop_thinking: bool) -> Prompt:
    """The whole prompt. A finished answer is what the model would have generated after the prompt before it."""
    *before, last = turns
    if last.task:
        prompt = _dialogue([*before, replace(last, task=None)], effort, drop_thinking)
        task = recipe.token(f"<｜{last.task}｜>")
        if last.role == "assistant" or last.task == "action":
            return prompt + task
        return prompt.part(0, prompt.special[-2][0]) + task  # in the place of the generation prompt
    if last.finished:
        answers_task = before[-1].task is not None  # by itself, without a thinking part
        return _dialogue(before, effort, drop_thinking) + _answer(last, None if answers_task else effort)
    return _conversation(turns, effort, keep=not drop_thinking or any(turn.tools for turn in turns))


def _answer(turn: Turn, effort: Effort | None) -> Prompt:
    """A finished answer from behind the generation prompt to its end token."""
    user = Turn("user", "")
    opening = recipe.render([user], effort, tools=True)
    whole = recipe.render([user, turn, user], effort, tools=True)
    return whole.part(len(opening.text), whole.special[-4][1])  # the last three tokens are the second user turn's


def _conversation(turns: list[Turn], effort: Effort | None, keep: bool) -> Prompt:
    """Turns up to a generation prompt or an unfinished answer, tools and formats behind the turns that declare them."""
    if effort is not None and not keep:
        _check_developers(turns)
    prompt = _without_blocks(turns, effort, keep)
    for index, turn in reversed([*enumerate(turns)]):
        if turn.tools or turn.response_format:
            end = _without_blocks(turns[: index + 1], effort, keep).special[-2][0]
            prompt = prompt.insert(end, _blocks(turn))
    return prompt


def _check_developers(turns: list[Turn]) -> None:
    """Refuses those that the encoding file would leave out, and their answer without a question."""
    asking = [index for index, turn in enumerate(turns) if turn.role in ("user", "developer", "tool")]
    for index in asking[:-1]:
        if turns[index].role == "developer":
            raise RequestError(
                f"{name_of('developer', index)}: is not the last one to be answered, and would be left out with the "
                "reasoning of its turn; declare tools, pass drop_thinking=False, or make it a user message."
            )


def _blocks(turn: Turn) -> Prompt:
    tools = recipe.tools_block(turn.tools) if turn.tools else Prompt("")
    return tools + (recipe.response_format_block(turn.response_format) if turn.response_format else Prompt(""))


def _without_blocks(turns: list[Turn], effort: Effort | None, keep: bool) -> Prompt:
    """The turns as the package renders them, with all reasoning or only that after the last user turn."""
    if effort is None or not keep:
        return recipe.render(turns, effort)
    # The package keeps all reasoning if there are tools: declare one, and cut the declaration after the system text.
    prompt = recipe.render(turns, effort, tools=True)
    start = recipe.render([turn for turn in turns if turn.role == "system"], effort).special[1][0]
    return prompt.part(0, start) + prompt.part(start + len(recipe.tools_block().text))


def _encode_parts(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Control tokens by their ids; what is between them without the added vocabulary, where they would be spelled."""
    plain = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    ids, end = [], 0
    for start, stop in prompt.special:
        ids += plain.encode(prompt.text[end:start], add_special_tokens=False).ids
        ids.append(_token_id(prompt.text[start:stop], tokenizer))
        end = stop
    return ids + plain.encode(prompt.text[end:], add_special_tokens=False).ids


def _token_id(token: str, tokenizer: Tokenizer) -> int:
    id = tokenizer.token_to_id(token)
    if id is None:
        raise RequestError(f"the tokenizer has no token {token}; expected the tokenizer.json of DeepSeek-V4.")
    return int(id)
