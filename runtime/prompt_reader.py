"""Text, tokens or messages, and pictures, become the prompts of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeq.errors import InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import Prompt, with_pictures
from edgeq.runtime.answers.thinking import Thinking
from edgeq.runtime.answers.tools import ToolUse, conversation, tool_use
from edgeq.runtime.arguments import integer, token_ids, wrong
from edgeq.runtime.network.pictures import ImageSource, Pictures
from edgeq.text.chat_template import ChatTemplate, Message
from edgeq.text.tokenizer import Tokenizer


class PromptReader:
    """Errors are those of Model.prompt and Model.chat."""

    def __init__(
        self,
        file: ModelFile,
        pictures: Pictures | None,
        text: Callable[[], Tokenizer],
        template: Callable[[], ChatTemplate | None],
    ) -> None:
        """`text` and `template` read tokenizer and chat template of the file when they are first needed."""
        self._file, self._config = file, file.metadata.config
        self._pictures, self._text, self._template = pictures, text, template

    def prompt(self, prompt: str | Sequence[int] | Prompt, images: Sequence[ImageSource]) -> Prompt:
        if isinstance(prompt, Prompt):
            if images:
                raise InputError("the prompt has its pictures already; leave `images` out")
            for picture in prompt.pictures:
                self.seeing().read(picture)
            return prompt
        if isinstance(prompt, (bytes, bytearray)):
            raise wrong("prompt", prompt, "a string or a list of token ids; decode it first")
        vocabulary = self._config.vocab_size
        if isinstance(prompt, str):
            vision = self._config.vision
            text = vision.texts.placed(prompt) if vision and vision.texts else prompt
            return self._with_pictures(self._text().encode(text), images)
        tokens = token_ids("prompt", prompt, vocabulary)
        return self._with_pictures(tokens, images)

    def tool_use(self, tools: Any, choice: Any, parallel: Any) -> ToolUse | None:
        """Which tools an answer may call; None: none."""
        template = self._template()
        return tool_use(template.tool_format if template else None, tools, choice, parallel)

    def thinking(self, prompt: Prompt, budget: int | None = None) -> Thinking | None:
        """How an answer to a chat's prompt thinks before, for at most `budget` tokens; None: not at all."""
        if budget is not None:
            integer("thinking_budget", budget, 0, 1 << 31, "an integer of at least 0, or None")
        template = self._template()
        form = template.thinking if template else None
        found = Thinking.of(form, self._text(), prompt.tokens, self._config.vocab_size) if form else None
        return found.within(budget) if found else None

    def chat(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageSource],
        variables: Mapping[str, Any],
        use: ToolUse | None = None,
    ) -> Prompt:
        """`use`: the tools that the prompt shows."""
        messages, shown = conversation(messages, use)
        variables = {**variables, **shown}
        template = self._template()
        if template is None:
            raise UnsupportedError(f"{self._file.path}: the file has no chat template; pass one as `chat_template=FILE`")
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Mapping) for m in messages):
            raise wrong("messages", messages, 'a list of dicts such as {"role": "user", "content": "..."}')
        if images:
            tokens = template.encode_with_images(messages, len(images), self.seeing().vision.image_token_id, **variables)
        else:
            tokens = template.encode(messages, **variables)
        return self._with_pictures(tokens, images)

    def seeing(self) -> Pictures:
        """InputError: the model reads text alone."""
        if self._pictures is None:
            raise InputError(f"{self._file.path}: this model ({self._config.model_type}) reads text alone; give it no images")
        return self._pictures

    def _with_pictures(self, tokens: list[int], images: Sequence[ImageSource]) -> Prompt:
        if not tokens:
            raise InputError("the prompt is empty; give at least one character")
        if not images and self._pictures is None:
            return Prompt(tokens)
        seeing = self.seeing()
        return with_pictures(tokens, seeing.read_all(images), seeing.vision, lambda text: self._text().encode_part(text))
