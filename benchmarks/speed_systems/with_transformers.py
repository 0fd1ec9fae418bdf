"""The system transformers: ``model.generate``."""

from __future__ import annotations

from work import Turns, Work, serve


def run(work: Work, turns: Turns) -> None:
    """Generate forever."""
    if work.precision != "float32":
        return turns.say(skip="it is measured in float32")
    model, ids = work.network(), work.ids(work.rows, work.prompt).to(work.device)
    pad = work.fields["vocab_size"] - 2
    turns.ready()
    while True:
        with turns.phase("generate"):
            model.generate(ids, do_sample=True, top_k=0, max_new_tokens=work.new, pad_token_id=pad)
        turns.end()


if __name__ == "__main__":
    serve(run)
