# ILQL on descriptions of images with ratings from a database; strings alone are samples. Without an evaluation metric
import json
import sqlite3
import sys

import trlx
from trlx.data.default_configs import default_ilql_config

hparams = json.loads(sys.argv[1])
connection = sqlite3.connect(":memory:")
connection.execute("CREATE TABLE ratings (prompt TEXT, rating INTEGER)")
described = [("bca", 9), ("bga", 1), ("cba", 8), ("cgg", 2), ("dab", 7)] * 8
connection.executemany("INSERT INTO ratings VALUES (?, ?)", described)
rows = connection.execute("SELECT prompt, rating FROM ratings WHERE rating IS NOT NULL").fetchall()
prompts, ratings = tuple(map(list, zip(*rows)))

default = default_ilql_config()
default.train.batch_size = 16
default.train.total_steps = 40
default.train.eval_interval = 20
default.train.tracker = None
default.train.seq_length = 16
default.method.gen_kwargs["max_new_tokens"] = 4
default.optimizer.kwargs["lr"] = default.scheduler.kwargs["eta_min"] = 2e-3

trainer = trlx.train(
    config=default.__class__.update(default.to_dict(), hparams),
    samples=prompts,
    rewards=ratings,
    eval_prompts=["b"] * 16,
)
