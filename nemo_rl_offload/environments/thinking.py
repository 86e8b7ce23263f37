"""What of a response is thinking, between tags of its own, in which no answer is looked for."""


def without_thinking(response: str, begin: str, end: str) -> str:
    """Leave out what stands between the tags.

    Before an end without a begin all is thinking, since a prompt may have begun it; after a begin without an end too,
    since the answer was never given.
    """
    *closed, last = response.split(end)
    kept = [text.partition(begin)[0] if begin in text else "" for text in closed]
    return "".join([*kept, last.partition(begin)[0]])
