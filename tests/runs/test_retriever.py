"""Retrievers: a retriever killed in any stage ends with the same bits, and its uses agree with its embeddings."""

import json
import subprocess
from contextlib import contextmanager

import pytest

from rheostat.flows.cli.app import main
from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput, RheostatError, RunChanged
from rheostat.infra.processes.episodes import EpisodeRequest
from rheostat.infra.store.runs import open_run
from rheostat.models.config.data import DeduplicatedData, FileData
from rheostat.models.config.environments import SearchEnvironment
from rheostat.models.config.reward_terms import SimilarityReward
from rheostat.models.data.problems import find_exclusions, load_problems
from rheostat.models.environments.pool import start_process
from rheostat.models.retrieval.measure import find, retrieval_of
from rheostat.models.retrieval.pairs import load_pairs
from rheostat.models.rewards.rules import build_reward
from rheostat.tasks.config.retriever import load_retriever_config
from rheostat.tasks.retriever import CHOSEN, TEACHER
from tests.support.in_process import InProcessJob
from tests.support.jobs import RHEOSTAT, ROOT, Job

SMALL = (
    *("pairs.facts=120", "encoder.steps=8", "encoder.batch_size=4", "encoder.hidden_size=16"),
    *("cross_encoder.steps=4", "cross_encoder.batch_size=4", "cross_encoder.hidden_size=16", "max_tokens=16"),
)


def small_config(store, *overrides):
    return load_retriever_config(
        ROOT / "configs/retriever.toml", [*SMALL, f"store={json.dumps(str(store))}", *overrides]
    )


@contextmanager
def fail_after(after):
    """Make the worker fail after this number of steps."""
    from rheostat.models.workers.retriever import RetrieverWorker

    with pytest.MonkeyPatch.context() as patch:
        count = RetrieverWorker._count

        def counted(worker):
            count(worker)
            if worker.progress() == after:
                raise RuntimeError("killed")

        patch.setattr(RetrieverWorker, "_count", counted)
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory, prefect_api):
    return InProcessJob(tmp_path_factory.mktemp("retriever"), prefect_api)


@pytest.fixture(scope="module")
def made(job):
    """Undisturbed retriever with all stages."""
    from rheostat.flows.retriever import retriever

    with job.prefect():
        return run_flow(retriever(small_config(job.store, "method=cascade")))


@pytest.mark.system
def test_a_retriever_killed_in_any_stage_ends_with_the_same_bits_and_repeats_no_stage(job, made, tmp_path):
    from rheostat.flows.retriever import retriever

    config = small_config(tmp_path, "method=cascade")
    with job.prefect():
        for after in (3, 10, 6):  # in the student, in its teacher, and in the student that is taught
            with fail_after(after), pytest.raises(RheostatError, match="killed"):
                run_flow(retriever(config))
        again = run_flow(retriever(config))
    assert (again.digest, again.measured) == (made.digest, made.measured)
    run, whole = (open_run(f"{store}/retrievers", "retriever") for store in (tmp_path, job.store))
    keys = ("pairs", "self-distillation", TEACHER, "cascade", CHOSEN)
    assert [run.require(key).digest for key in keys] == [whole.require(key).digest for key in keys]
    assert [run.require(key).provenance.epoch for key in keys] == [1, 2, 3, 4, 4]


@pytest.mark.system
def test_a_finished_retriever_is_reported_again_and_another_configuration_is_refused(job, made):
    from rheostat.flows.retriever import retriever

    with job.prefect():
        assert run_flow(retriever(small_config(job.store, "method=cascade", "report_steps=1"))) == made
        with pytest.raises(RunChanged, match="max_tokens was 16, is 17"):
            run_flow(retriever(small_config(job.store, "method=cascade", "max_tokens=17")))


@pytest.mark.system
def test_sentence_transformers_loads_a_retriever_and_measures_the_reported_metrics(job, made):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    pairs = load_pairs(small_config(job.store))
    model = SentenceTransformer(made.path, local_files_only=True)
    measure = InformationRetrievalEvaluator(
        {str(number): pair.query for number, pair in enumerate(pairs.heldout)},
        {text: text for text in pairs.passages},
        {str(number): {pair.passage} for number, pair in enumerate(pairs.heldout)},
        precision_recall_at_k=[50],
        write_csv=False,
    )
    assert retrieval_of(find(model, pairs).ranks_B, seed=0).mrr == made.measured["cascade"].mrr
    assert made.method == "cascade" and made.measured["cascade"].queries == len(pairs.heldout)
    found = measure(model.double())  # in float32 scores are equal here and there, which the two rank differently
    measured = retrieval_of(find(model, pairs).ranks_B, seed=0)
    assert measured.mrr == pytest.approx(found["dot_mrr@10"], abs=1e-6)
    assert measured.recall == pytest.approx(found["dot_recall@50"], abs=1e-6)


@pytest.mark.system
def test_training_problems_near_held_out_problems_are_excluded_and_reported(made, tmp_path):
    from sentence_transformers import SentenceTransformer

    def written(name, *prompts):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
        return path

    train = written("train.jsonl", "Red  DOG Forest", "blue cat river", "white horse house")
    source = FileData(path=train, heldout_path=written("heldout.jsonl", "red dog forest", "green bird cave"))
    model = SentenceTransformer(made.path)
    heldout = model.encode(["red dog forest", "green bird cave"], normalize_embeddings=True)
    farther = model.encode(["blue cat river", "white horse house"], normalize_embeddings=True) @ heldout.T
    data = DeduplicatedData(source=source, retriever=made.path, similarity=(1 + float(farther.max())) / 2)
    assert [problem.prompt for problem in load_problems(data, "train", 0)] == ["blue cat river", "white horse house"]
    assert load_problems(data, "heldout", 0) == load_problems(source, "heldout", 0)
    assert find_exclusions(data, 0) == {f"{train}:1": f"is near {tmp_path / 'heldout.jsonl'}:1, cosine 1.000"}
    assert DeduplicatedData.model_validate_json(data.model_dump_json()) == data
    with pytest.raises(ValueError, match=r"source\.on_too_long must not be set. Set on_too_long"):
        DeduplicatedData(source=source.model_copy(update={"on_too_long": "drop"}), retriever=made.path)
    with pytest.raises(BadInput, match=r"similarity is 1e-09, at which every training problem \(3\)"):
        load_problems(data.model_copy(update={"similarity": 1e-9}), "train", 0)


@pytest.mark.system
def test_the_similarity_reward_is_the_cosine_of_the_embeddings_of_completion_and_answer(made):
    from sentence_transformers import SentenceTransformer

    reward = build_reward(SimilarityReward(retriever=made.path))
    one, other = SentenceTransformer(made.path).encode(["red dog", "blue cat"], normalize_embeddings=True)
    assert reward("", "red dog", "blue cat") == pytest.approx(float(one @ other), abs=1e-6)
    assert reward("", "red dog", "RED dog") == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="reference answer of this problem is empty"):
        reward("", "red dog", " ")


@pytest.mark.system
def test_the_search_tool_returns_the_nearest_passages_of_a_file(made, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = ["red dog forest", "blue cat river", "white horse house", "green bird cave"]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tool = start_process(SearchEnvironment(retriever=made.path, corpus=corpus, passages=2), describes=True)
    tool.ready()
    assert tool.schemas[0]["function"]["name"] == "search"

    def told(arguments):
        call = {"name": "search", "arguments": arguments, "error": ""}
        step, _ = tool.step(EpisodeRequest("0", problem={}, seed=0, turns=({"text": "", "calls": [call]},)))
        return step.messages[0].content

    first, second = told({"query": "blue cat river"}).splitlines()
    assert first == "1. blue cat river" and second.startswith("2. ") and second[3:] in texts
    assert told({"query": " "}) == "Error: search: expected a text as query"
    step, _ = tool.step(EpisodeRequest("0", problem={}, seed=0, turns=({"text": "done", "calls": []},)))
    assert step.done
    corpus.with_name("empty.jsonl").write_text("")
    with pytest.raises(BadInput, match=r"corpus is .*empty.jsonl, but this file contains no passages"):
        start_process(
            SearchEnvironment(retriever=made.path, corpus=corpus.with_name("empty.jsonl")), describes=False
        ).ready()


@pytest.mark.system
def test_invalid_retriever_settings_are_refused_in_one_line_and_nothing_is_written(job, tmp_path, capsys, monkeypatch):
    (tmp_path / "pairs.jsonl").write_text('{"query": "a", "text": "b"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code/modules.json").write_text('[{"type": "os.path.join"}]')
    store = tmp_path / "store"

    def said(*overrides):
        with job.prefect():
            code = main(["retriever", str(ROOT / "configs/retriever.toml"), *overrides, "--store", str(store)])
        error = capsys.readouterr().err
        [line] = [line for line in error.splitlines() if line.startswith("rheostat: ")]
        assert (code, store.exists()) == (2, False)
        return line

    pairs = (f"pairs.path={tmp_path / 'pairs.jsonl'}", "pairs.kind=file")
    command = [RHEOSTAT, "retriever", str(ROOT / "configs/retriever.toml"), *pairs, "--store", str(store)]
    environment = Job(tmp_path, job.api).environment()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n"), store.exists()) == (2, 1, False), ended.stderr
    assert "pairs.jsonl:1: there is no column 'passage'. The columns are: query, text." in ended.stderr
    folder = tmp_path / "folder"
    assert (
        f"encoder.path {folder}: the directory of an encoder must contain modules.json or config.json, found no file"
        in said(f"encoder.path={folder}")
    )
    code = tmp_path / "code"
    assert "contains the module 'os.path.join'" in said(f"cross_encoder.path={code}")
    assert "unknown key 'encoder.stepz'" in said("encoder.stepz=3")
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert "sentence-transformers is not installed. Run: pip install" in said()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_self_distillation_improves_a_retriever_trained_on_few_pairs(job, seed, tmp_path):
    from rheostat.flows.retriever import retriever

    config = ROOT / "configs/retriever.toml"
    with job.prefect():
        found = [
            run_flow(
                retriever(
                    load_retriever_config(config, [f"seed={seed}", f"method={method}", f"store={tmp_path / method}"])
                )
            )
            for method in ("dual", "self-distillation")
        ]
    alone, taught = (made.measured[made.method] for made in found)
    assert alone.mrr < taught.mrr
