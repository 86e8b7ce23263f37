"""The token ids of a question, which a response continues."""

from nemo_rl_offload.data.first_tokens import first_tokens
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.errors import DataError
from nemo_rl_offload.specs.bounded_template import RunawayTemplateError

_BEGINNING = 1000
"""Characters, which show whether a tokenizer adds its beginning token."""


def encode_prompt(
    tokenizer: Tokenizer, template: str | None, question: str, num_tokens: int = 1 << 60, *, system: str | None = None
) -> list[int]:
    """Return the token ids that the response continues; of a very long question the first, at least ``num_tokens``.

    ``template`` holds ``{question}``, and other braces stay as they are; None takes the tokenizer's chat template with
    one user turn, behind one of ``system``. To a template the tokenizer may add its beginning token, never its end
    token.

    Raises:
        DataError: ``template`` is None, and the tokenizer has no chat template, or that refuses the question.
    """
    question = question.strip()
    if template is None:
        if tokenizer.chat_template is None:
            raise DataError(
                "data.prompt_template: null takes the tokenizer's chat template, and it has none. "
                "Give a template, such as '{question}\\n', or policy.tokenizer.chat_template."
            )
        turns = [{"role": "user", "content": question}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except RunawayTemplateError:
            raise
        except Exception as error:
            raise DataError(f"policy.tokenizer.chat_template: the template refuses a question: {error}") from error
        return first_tokens(tokenizer, text, num_tokens)[0]
    text = template.replace("{question}", question)
    ids = first_tokens(tokenizer, text, num_tokens)[0]
    if (bos := tokenizer.bos_token_id) is None:
        return ids
    adds_bos = tokenizer.encode(text[:_BEGINNING])[:1] == [bos] != ids[:1]
    return [bos, *ids] if adds_bos else ids
