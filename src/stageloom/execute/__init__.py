"""The runtime: the same schedule value trains, on real processes, with the gradients of one process.

Nothing is imported here, so that `import stageloom` stays quick; import from the modules: `stageloom.execute.pipeline`
(Pipeline), `.workers` (local processes), `.partition` (split a model), `.language` (a small model to try it on).
"""
