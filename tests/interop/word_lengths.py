"""A taskset of verifiers, for the tests: answer with a number, and write it to a file."""

import verifiers.v1 as vf

__all__ = ["WordLengths"]


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def said(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def written(self, trace, runtime) -> float:
        try:
            return float((await runtime.read("answer.txt")).decode().strip() == self.data.answer)
        except vf.SandboxError:
            return 0.0

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class WordLengths(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("moon", "river"):
            prompt = f"How many letters has {word}? Say the number, and write it to answer.txt."
            yield WordTask(WordData(id=word, prompt=prompt, answer=str(len(word))), self.config.task)
        yield WordTask(WordData(id="boxed", prompt="Anything.", answer="0", image="python:3.12"), self.config.task)
