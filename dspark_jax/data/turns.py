"""What a model answered, and after which prompt: from turns to the token sequences that a drafter is trained on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dspark_jax import chat
from dspark_jax.data.document import Document
from dspark_jax.errors import RequestError
from dspark_jax.jobs.text import Text


@dataclass(frozen=True)
class Turn:
    """One answer of the model.

    Attributes:
        prompt: token ids of everything before it, as the model reads them when it answers.
        response: token ids of the answer, the end-of-turn token included where the model wrote one.
    """

    prompt: Sequence[int]
    response: Sequence[int]


def turns_of_dialogue(messages: Sequence[chat.Message], thinking: chat.Thinking, text: Text) -> list[Turn]:
    """The assistant's turns of a dialogue, each with the prompt that the model would be given for it.

    A response is what the dialogue up to and with it has behind the tokens of the prompt: the end-of-turn token
    belongs to it, the role's marker and the opening of the thinking part do not.

    Raises:
        RequestError: no assistant message; reasoning that would be left out since `thinking` is off; or the messages
            make no dialogue that the model was trained on.
    """
    turns = []
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            if thinking == "off" and message.get("reasoning_content"):
                raise RequestError(
                    f"message {index} (assistant): has reasoning_content, which is left out since thinking is off; "
                    'give the row "thinking": "high", or take the reasoning away.'
                )
            prompt = text.encode_messages(messages[:index], thinking)
            whole = text.encode_messages(messages[: index + 1], thinking, generation_prompt=False)
            assert whole[: len(prompt)] == prompt, "an answer is what comes behind its prompt"
            turns.append(Turn(prompt, whole[len(prompt) :]))
    if not turns:
        raise RequestError("the dialogue has no assistant message, so there is nothing to learn; add the answer.")
    return turns


def join(turns: Iterable[Turn]) -> list[Document]:
    """Documents in which exactly the responses are supervised.

    Turns share a document as long as each prompt goes on from the turn before it, token by token. A new document begins
    where it does not: where thinking is on, the model does not see the reasoning of earlier turns again, and no single
    sequence holds all that it saw.
    """
    chains: list[list[Turn]] = []
    seen: list[int] = []
    for turn in turns:
        if chains and list(turn.prompt[: len(seen)]) == seen:
            chains[-1].append(turn)
        else:
            chains.append([turn])
        seen = [*turn.prompt, *turn.response]
    return [_document(chain) for chain in chains]


def _document(turns: Sequence[Turn]) -> Document:
    last = turns[-1]
    supervised = np.zeros(len(last.prompt) + len(last.response), bool)
    for turn in turns:
        supervised[len(turn.prompt) : len(turn.prompt) + len(turn.response)] = True
    return Document(np.fromiter(chain(last.prompt, last.response), np.int32), supervised)
