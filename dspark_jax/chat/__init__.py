"""Chat with DeepSeek-V4: messages to the token ids the model was trained on, and its answer back to a message.

from dspark_jax import chat

ids = chat.encode([{"role": "user", "content": "Hello"}], tokenizer, thinking="high")
answer = chat.parse(completion_ids, tokenizer, thinking="high")
answer.content, answer.reasoning_content, answer.tool_calls

DeepSeek's own package renders and reads (`deepseek-recipe`, MIT, the extra `chat`); its fixed prompt texts are in no
file here. Added: the effort levels of each release, and whatever makes a prompt equal to that of `encoding_dsv4.py`,
which the checkpoints ship, where the package differs. Dialogues on which DeepSeek's implementations differ are refused.
"""

from dspark_jax.chat.answer import Answer, parse, parse_text
from dspark_jax.chat.messages import Message, ToolCall, messages_of, read_messages
from dspark_jax.chat.prompt import Thinking, encode, render
from dspark_jax.chat.release import Release, release_of

__all__ = [
    "Answer",
    "Message",
    "Release",
    "Thinking",
    "ToolCall",
    "encode",
    "messages_of",
    "parse",
    "parse_text",
    "read_messages",
    "release_of",
    "render",
]
