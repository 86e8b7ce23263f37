"""How a reward function is called, as messages say it."""

CALL = (
    "It is called with one conversation, whose response is messages[-1]['content'], and its record, entry; so "
    "TRL's reward(prompts, completions, **kwargs) that reads text is adapted by def score(messages, entry): return "
    "reward(prompts=[messages[-2]['content']], completions=[messages[-1]['content']], **{key: [value] for key, value "
    "in entry.items()})[0]; one that reads messages gets prompts=[messages[:-1]], completions=[messages[-1:]]"
)
OF_TRL = "completions"
"""The parameter by which a function of TRL's is known."""
