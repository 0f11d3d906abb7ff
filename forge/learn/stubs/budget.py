"""Choose the token budget of a server that must keep two promises.

18 requests a second arrive, with prompts of 512 to 2,048 tokens and 64 to 128 tokens of output. The
promises: 99 % of the times between two tokens are below 35 ms, and 90 % of the requests are good:
their first token comes within a second, and their tokens every 50 ms on average.

`max_num_batched_tokens` bounds the tokens of a step, and prompts are computed in chunks of what is
left of it. Choose its value. To try one yourself:

    forge sim sweep --cost affine:10000,20,20 --budgets 64,2048 --rates 18 --prompt 512-2048 \\
        --output 64-128 --num-blocks 8192 --requests 200

The check simulates three drawn arrivals. A step takes 10 ms, 20 us a row and 20 us a token: another
GPU than that of the page, so its table has no answer.
"""

MAX_NUM_BATCHED_TOKENS = 0
