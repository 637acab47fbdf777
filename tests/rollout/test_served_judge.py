"""The reward `judge` with a real SGLang server behind it. The toy model judges nothing: a bias has it say one digit.

SGLang's `regex` would do the same, but without a GPU its xgrammar 0.2.1 backend pins memory and ends the server.
"""

import asyncio

import pytest

from megarl.errors import RunError
from megarl.rewards.judge import judge
from megarl.sample import Prompt, Sample

OPTIONS = {"model": "toy", "prompt": "{question} {response}", "pattern": "([0-9])", "high": 9.0, "max_tokens": 8}


def sample_with(response):
    prompt = Prompt([{"role": "user", "content": "3 + 4 ="}], [1], "7")
    return Sample.from_response(prompt, [2], group_id=0, index=0, response_text=response)


def saying(digit, tokenizer):
    bias = {str(tokenizer.convert_tokens_to_ids(digit)): 100}
    return {"logit_bias": bias, "stop": [digit], "no_stop_trim": True}


def test_a_real_server_gives_the_score(sglang_server, tokenizer):
    async def judged():
        calls = [
            judge(sample_with("7"), base_url=f"{sglang_server.url}/v1", extra_body=saying(digit, tokenizer), **OPTIONS)
            for digit in "0369"
        ]
        return await asyncio.gather(*calls)

    assert asyncio.run(judged()) == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_what_a_real_server_refuses_or_cuts_is_an_error(sglang_server, tokenizer):
    url = f"{sglang_server.url}/v1"
    with pytest.raises(RunError, match=f"^{url}: toy: .*longer than"):
        asyncio.run(judge(sample_with("7" * 300), base_url=url, **OPTIONS))
    cut = saying("7", tokenizer) | {"stop": None}
    with pytest.raises(RunError, match="not whole .finish_reason='length', max_tokens=8.: it ends in '77777777'"):
        asyncio.run(judge(sample_with("7"), base_url=url, extra_body=cut, **OPTIONS))
