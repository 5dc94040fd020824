"""Regular expressions by which byte-level tokenizers of published models split a text before they merge, by their first model.

The time of each was found to grow as the text does.
"""

from __future__ import annotations

_WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SIGNS = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+{_SIGNS}|\s+(?!\S)|\s+"
GPT4 = rf"{_WORDS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}{_SIGNS}[\r\n]*{_BREAKS}"
"""Llama 3's too."""
QWEN2 = rf"{_WORDS}|{_START}\p{{L}}+|\p{{N}}{_SIGNS}[\r\n]*{_BREAKS}"
"""Qwen 3's too."""
QWEN3_5 = rf"{_WORDS}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_BREAKS}"
"""Marks are letters, too."""
TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}{_SIGNS}[\r\n/]*{_BREAKS}"
"""Mistral's."""
GPT4O = rf"{_START}{_UPPER}*{_LOWER}+{_WORDS}?|{_START}{_UPPER}+{_LOWER}*{_WORDS}?|\p{{N}}{{1,3}}{_SIGNS}[\r\n/]*{_BREAKS}"
"""Llama 4's too."""
DEEPSEEK3_DIGITS, DEEPSEEK3_CHINESE = r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _BREAKS
)
"""After its digits and Chinese and Japanese letters were taken out; Hunyuan's too."""
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
"""Words of any script, apart from what ends or parts them."""
THREE_DIGITS = "[0-9][0-9][0-9]"
"""Falcon's, after GPT-2's."""
SPACES = " {2,}"
"""In normalizers of SentencePiece models."""
