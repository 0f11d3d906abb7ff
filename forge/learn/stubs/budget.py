"""Choose the token budget of a server that must keep two promises.

12 requests a second arrive, with prompts of 512 to 2,048 tokens and 64 to 128 tokens of output. The
promises: 99 % of the times between two tokens are below 15 ms, and 90 % of the requests are good:
their first token comes within a second, and their tokens every 50 ms on average.

`max_num_batched_tokens` bounds the tokens of a step, and prompts are computed in chunks of what is
left of it. Choose its value. To try one yourself:

    forge sim sweep --budgets 64,2048 --rates 12 --prompt 512-2048 --output 64-128 \\
        --num-blocks 4096 --requests 300

The check simulates three drawn arrivals; a step takes 6 ms, 20 us a row and 25 us a token.
"""

MAX_NUM_BATCHED_TOKENS = 0
