"""Results of models that generated nothing, for tests of what is made of results."""

from megarl.evaluation.results import ModelResult, PromptResult, Response


def response(reward, answer=None, text="", num_tokens=1, truncated=False, parts=None):
    """With the reward None, one whose reward failed."""
    error = "raised ValueError: no number" if reward is None else None
    return Response(text, num_tokens, truncated, reward, parts or {}, answer, error)


def result(rewards_PG, name="model", answers_PG=None, **settings):
    """Of the rewards of each prompt's responses; `answers_PG`: their final answers."""
    prompts = []
    for place, rewards in enumerate(rewards_PG):
        answers = answers_PG[place] if answers_PG else [None] * len(rewards)
        responses = [response(reward, answer) for reward, answer in zip(rewards, answers, strict=True)]
        messages = [{"role": "user", "content": f"question {place}"}]
        prompts.append(PromptResult(f"test.jsonl:{place + 1}", messages, "18", responses))
    return ModelResult(name, prompts, settings, has_answers=answers_PG is not None)
