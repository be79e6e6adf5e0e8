"""Images hold what the blocks held, whatever the layout, and copies end as the backends promise."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from sola_sched.kv_swap import worker as worker_module  # noqa: E402
from sola_sched.kv_swap.geometry import Geometry  # noqa: E402  after the check for torch
from sola_sched.kv_swap.jobs import Job, Piece, Report  # noqa: E402
from sola_sched.kv_swap.packing import Packer  # noqa: E402
from sola_sched.kv_swap.tiles import TokenOrder  # noqa: E402
from sola_sched.kv_swap.transfer import StreamTransfers, ThreadTransfers  # noqa: E402
from sola_sched.kv_swap.worker import SwapWorker, _available_bytes  # noqa: E402

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, CHANNELS = 12, 2, 8, 6


def make_cache(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random KV ``[blocks, heads, tokens, channels]`` that lies tokens before heads in memory."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, CHANNELS)
    return torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)


def make_packer(
    caches: list[torch.Tensor], *, is_int8: bool, block_size: int = BLOCK_SIZE, **options: Any
) -> Packer:
    num_blocks = caches[0].shape[0] * caches[0].shape[2] // block_size
    return Packer(
        caches,
        num_blocks,
        block_size,
        is_int8=is_int8,
        group_tokens=options.pop("group", 5),
        **options,
    )


def piece(
    block_ids: list[int], num_tokens: int, first: int = 0, *, start: int | None = None
) -> Piece:
    """Positions `first` to `first + num_tokens`, in `block_ids` from their own block on."""
    begin = first if start is None else start
    return Piece(0, first, num_tokens, (), begin, first + num_tokens, tuple(block_ids))


def tokens_of(cache: torch.Tensor, block_ids: list[int], count: int) -> torch.Tensor:
    return cache.transpose(1, 2)[block_ids].flatten(0, 1)[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_raw_images_are_exact(dtype: torch.dtype) -> None:
    source, target = make_cache(dtype), torch.zeros_like(make_cache(dtype))
    packer = make_packer([source, source + 1], is_int8=False)
    restorer = make_packer([target, other := torch.zeros_like(target)], is_int8=False)
    image = torch.empty(packer.image_bytes(19), dtype=torch.uint8)

    packer.pack(piece([3, 7, 1], 19), image)
    restorer.unpack(piece([2, 5, 4], 19), image)

    assert torch.equal(tokens_of(target, [2, 5, 4], 19), tokens_of(source, [3, 7, 1], 19))
    assert torch.equal(tokens_of(other, [2, 5, 4], 19), tokens_of(source + 1, [3, 7, 1], 19))
    assert not target[[0, 1, 3, 6]].any()


def test_layers_of_different_dtypes_share_an_image() -> None:
    caches = [make_cache(torch.uint8), make_cache(torch.float32), make_cache(torch.bfloat16)]
    before = [cache.clone() for cache in caches]
    packer = make_packer(caches, is_int8=False)
    image = torch.empty(packer.image_bytes(8), dtype=torch.uint8)

    packer.pack(piece([3], 8), image)
    for cache in caches:
        cache[3] = 0
    packer.unpack(piece([3], 8), image)

    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@pytest.mark.parametrize("is_int8", [False, True])
def test_part_of_an_image_is_restored(is_int8: bool) -> None:
    """A prefix hit already holds the first block; what it shares must not be written."""
    source, target = make_cache(), torch.zeros_like(make_cache())
    image = torch.empty(make_packer([source], is_int8=is_int8).image_bytes(19), dtype=torch.uint8)
    make_packer([source], is_int8=is_int8).pack(piece([3, 7, 1], 19), image)

    make_packer([target], is_int8=is_int8).unpack(piece([5, 4], 19, start=8), image)

    restored, expected = tokens_of(target, [5, 4], 11), tokens_of(source, [7, 1], 11)
    torch.testing.assert_close(restored, expected, atol=0.02 if is_int8 else 0, rtol=0)
    assert not target[[3, 7, 1, 2]].any()


def test_int8_images_begin_at_any_token() -> None:
    source, target = make_cache(), torch.zeros_like(make_cache())
    packer, restorer = make_packer([source], is_int8=True), make_packer([target], is_int8=True)
    image = torch.empty(packer.image_bytes(9), dtype=torch.uint8)

    packer.pack(piece([3, 7], 9, first=5), image)  # tokens 5 to 13
    restorer.unpack(piece([2, 6], 9, first=5), image)

    expected = tokens_of(source, [3, 7], 14)[5:]
    restored = tokens_of(target, [2, 6], 16)
    torch.testing.assert_close(restored[5:14], expected, atol=0.02, rtol=0)
    assert not restored[:5].any()
    assert not restored[14:].any()


@pytest.mark.parametrize("is_int8", [False, True])
def test_kernel_blocks_may_be_a_fraction_of_the_schedulers(is_int8: bool) -> None:
    source, target = make_cache(), torch.zeros_like(make_cache())
    options: dict[str, Any] = {"is_int8": is_int8, "block_size": 2 * BLOCK_SIZE}
    packer, restorer = make_packer([source], **options), make_packer([target], **options)
    image = torch.empty(packer.image_bytes(20), dtype=torch.uint8)

    packer.pack(piece([4, 1], 20), image)
    restorer.unpack(piece([0, 2], 20), image)

    restored, expected = (
        tokens_of(target, [0, 1, 4, 5], 20),
        tokens_of(source, [8, 9, 2, 3], 20),
    )
    torch.testing.assert_close(restored, expected, atol=0.02 if is_int8 else 0, rtol=0)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("group", [1, 3, 64, None])
def test_images_fit_the_slots_that_are_counted_for_them(is_int8: bool, group: int | None) -> None:
    packer = make_packer([make_cache()], is_int8=is_int8, group=group)
    geometry = Geometry.of([BLOCK_SIZE], is_int8=is_int8, group_tokens=group, segment_tokens=64)
    slot_bytes = packer.image_bytes(geometry.slot_tokens)

    for num_tokens in range(1, 97):
        assert packer.image_bytes(num_tokens) <= geometry.num_slots(num_tokens) * slot_bytes


def scrambled(key: torch.Tensor, value: torch.Tensor, page: torch.Tensor) -> None:
    """A kernel that keeps keys transposed and values backwards."""
    num_tokens, num_heads, head_dim = key.shape
    halves = page.view(num_heads, 2, head_dim * num_tokens)
    halves[:, 0] = key.permute(1, 2, 0).reshape(num_heads, -1)
    halves[:, 1] = value.flip(0).permute(1, 0, 2).reshape(num_heads, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_in_a_block_is_found_out(dtype: torch.dtype) -> None:
    order = TokenOrder(torch.empty(1, NUM_HEADS, BLOCK_SIZE, CHANNELS, dtype=dtype), scrambled)
    plain = torch.randn(BLOCK_SIZE, NUM_HEADS, CHANNELS).to(dtype)
    cache = torch.zeros(4, NUM_HEADS, BLOCK_SIZE, CHANNELS, dtype=dtype)
    key, value = plain.chunk(2, dim=2)
    scrambled(key, value, cache[2:3])
    found = order.gather(cache, torch.tensor([2]))
    copied = torch.zeros_like(cache)
    order.scatter(found, copied, torch.tensor([2]))

    assert torch.equal(found[0], plain)
    assert torch.equal(copied, cache)


def test_a_kernel_that_loses_elements_is_refused() -> None:
    page = torch.empty(1, NUM_HEADS, BLOCK_SIZE, CHANNELS)
    with pytest.raises(RuntimeError, match="a place of its own"):
        TokenOrder(page, lambda key, value, page: None)


def make_worker(transfers: Any = None) -> tuple[SwapWorker, torch.Tensor]:
    cache = make_cache()
    geometry = Geometry.of([BLOCK_SIZE], is_int8=False, group_tokens=None, segment_tokens=32)
    packer = make_packer([cache], is_int8=False)
    worker = SwapWorker(geometry, [packer], cache.device, 1 << 16, transfers)
    return worker, cache


def save_job(job_id: int, block_ids: list[int], slots: tuple[int, ...]) -> Job:
    end = len(block_ids) * BLOCK_SIZE
    return Job(job_id, "a", False, (Piece(0, 0, end, slots, 0, end, tuple(block_ids)),))


def load_job(job_id: int, block_ids: list[int], slots: tuple[int, ...]) -> Job:
    end = len(block_ids) * BLOCK_SIZE
    return Job(job_id, "a", True, (Piece(0, 0, end, slots, 0, end, tuple(block_ids)),))


def wait_for(worker: SwapWorker, job_id: int) -> tuple[Report, set[str], set[str]]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        polled = worker.poll()
        if job_id in polled[0].num_ended:
            return polled
        time.sleep(0.001)
    raise AssertionError("a copy must end within 30 s")


@pytest.mark.parametrize("slots", [(0, 1, 2), (5, 2, 9)], ids=["neighbours", "scattered"])
def test_what_goes_out_comes_back(slots: tuple[int, ...]) -> None:
    worker, cache = make_worker()
    before = cache.clone()
    worker.submit([save_job(1, [3, 7, 1], slots)])
    report, _, _ = wait_for(worker, 1)
    cache.zero_()

    worker.submit([load_job(2, [4, 8, 2], slots)])
    second, loaded, failed = wait_for(worker, 2)

    assert torch.equal(cache[[4, 8, 2]], before[[3, 7, 1]])
    assert (loaded, failed) == ({"a"}, set())
    assert report.save_bytes == second.load_bytes > 0
    worker.close()


def test_a_copy_that_fails_is_reported_once() -> None:
    worker, _ = make_worker()

    def fail(job: Job) -> None:
        raise OSError("broken")

    worker.transfers.before_copy = fail  # type: ignore[attr-defined]
    worker.submit([load_job(1, [4], (0,))])
    report, loaded, failed = wait_for(worker, 1)

    assert (report.failed, loaded, failed) == ({1}, {"a"}, {"a"})
    assert worker.is_idle
    assert worker.poll()[0].is_empty
    worker.close()


def test_a_worker_is_idle_once_all_that_it_has_to_tell_is_told() -> None:
    """While it is, the engine's steps do not ask it."""
    worker, _ = make_worker()
    is_idle = [worker.is_idle]
    worker.poll()  # tells the slots
    is_idle.append(worker.is_idle)
    worker.submit([save_job(1, [3], (0,)), load_job(2, [4], (1,))])
    is_idle.append(worker.is_idle)
    told: set[int] = set()
    while len(told) < 2:
        assert not worker.is_idle
        told.update(worker.poll()[0].num_ended)

    assert is_idle == [False, True, False]
    assert worker.is_idle
    worker.close()


def test_late_copies_start_late() -> None:
    transfers = ThreadTransfers()
    transfers.delay_polls = lambda job: 3
    done: list[int] = []
    transfers.submit(save_job(1, [1], (0,)), lambda job: done.append(job.job_id))

    seen = [list(done), *([transfers.poll(), list(done)][1] for _ in range(2))]
    transfers.poll()
    transfers.close()

    assert seen == [[], [], []]
    assert done == [1]


def test_what_a_copy_takes_does_not_depend_on_when_it_is_asked_for() -> None:
    """On a CPU the next poll comes a step later."""
    transfers = ThreadTransfers(1)
    for job_id in range(2):
        transfers.submit(save_job(job_id, [1], (0,)), lambda job: time.sleep(0.01))
    time.sleep(0.3)
    ended = transfers.poll()
    transfers.close()

    assert len(ended) == 2
    assert all(0.01 <= each.elapsed_s < 0.15 for each in ended)


def test_a_copy_for_which_no_thread_can_be_started_has_failed_and_is_not_made_later() -> None:
    class Starved:
        def __init__(self) -> None:
            self.queued: list[Any] = []

        def submit(self, run: Any) -> None:
            self.queued.append(run)  # as the real one does before it starts a thread
            raise RuntimeError("can't start new thread")

    copied: list[int] = []
    transfers = ThreadTransfers()
    transfers._pool = pool = Starved()  # type: ignore[assignment]
    transfers.submit(save_job(1, [1], (0,)), lambda job: copied.append(job.job_id))
    (ended,) = transfers.poll()
    pool.queued[0]()

    assert isinstance(ended.error, RuntimeError)
    assert copied == []


def test_polling_without_a_pause_does_not_starve_the_copy() -> None:
    """Each of a copy's calls gives up the interpreter, and a busy thread keeps it for 5 ms."""
    transfers, source = ThreadTransfers(), torch.zeros(4096)
    num_polls = []
    for job_id in range(5):
        transfers.submit(
            save_job(job_id, [1], (0,)), lambda job: [source.clone() for _ in "x" * 50]
        )
        num_polls.append(1)
        while not transfers.poll():
            num_polls[-1] += sum(range(1000)) > 0
    transfers.close()

    assert sorted(num_polls)[2] < 100, "thousands when polling keeps the interpreter"


def test_the_first_report_names_the_slots() -> None:
    worker, _ = make_worker()

    reports = [worker.poll()[0].num_slots for _ in range(2)]

    assert reports == [worker.num_slots, None]
    assert worker.num_slots > 0
    worker.close()


def test_without_host_memory_there_are_no_slots() -> None:
    geometry = Geometry.of([BLOCK_SIZE], is_int8=False, group_tokens=None, segment_tokens=32)
    cache = make_cache()
    worker = SwapWorker(geometry, [make_packer([cache], is_int8=False)], cache.device, 0)

    assert worker.poll()[0].num_slots == 0
    worker.close()


def test_a_worker_leaves_half_of_the_hosts_memory(monkeypatch) -> None:
    monkeypatch.setattr("sola_sched.kv_swap.worker._available_bytes", lambda: 1 << 16)
    warnings: list[str] = []  # whatever an engine has done to vLLM's loggers
    monkeypatch.setattr(
        logging.getLogger("vllm.sola_sched"), "warning", lambda text, *args: warnings.append(text)
    )
    worker, _ = make_worker()

    assert worker.pool is not None
    assert worker.pool.num_bytes <= 1 << 15
    assert any("this worker takes" in text for text in warnings)
    worker.close()


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What is logged, whatever an engine has done to vLLM's loggers."""
    found: list[str] = []
    logger = logging.getLogger("vllm.sola_sched")
    monkeypatch.setattr(logger, "warning", lambda text, *args: found.append(text % args))
    return found


def test_the_workers_of_a_host_leave_half_of_its_memory_together(monkeypatch, warnings) -> None:
    monkeypatch.setattr(worker_module, "_available_bytes", lambda: 1 << 16)
    cache = make_cache()
    geometry = Geometry.of([BLOCK_SIZE], is_int8=False, group_tokens=None, segment_tokens=32)
    workers = [
        SwapWorker(
            geometry,
            [make_packer([cache], is_int8=False)],
            cache.device,
            1 << 14,
            num_workers=4,
        )
        for _ in range(4)
    ]

    taken = [worker.pool.num_bytes for worker in workers if worker.pool is not None]
    assert len(taken) == 4
    assert 0 < sum(taken) <= 1 << 15
    assert len(warnings) == 4
    for worker in workers:
        worker.close()


@pytest.mark.parametrize(("limit_bytes", "num_warnings"), [(1000, 1), (0, 0)])
def test_memory_for_no_slot_is_named_in_the_log(limit_bytes, num_warnings, warnings) -> None:
    """Without any, the operator has asked for none."""
    assert worker_module._pool(1 << 20, limit_bytes, 1) is None

    assert len(warnings) == num_warnings
    for text in warnings:
        assert "1048576 bytes" in text
        assert "1000" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("MemTotal: 9 kB\nMemAvailable:   3 kB\n", 3072), ("MemTotal: 9 kB\n", None), ("?", None)],
)
def test_available_memory_is_read_where_the_system_tells(
    monkeypatch, tmp_path, text, expected
) -> None:
    monkeypatch.setattr(worker_module, "_LIMITS", ())
    (tmp_path / "meminfo").write_text(text)

    assert _available_bytes(str(tmp_path / "meminfo")) == expected
    assert _available_bytes(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize(
    ("limit", "taken", "parts", "expected"),
    [
        ("4096", "1024", None, 3072),
        ("4096", "9999", None, 0),
        ("max", "1024", None, 8192),
        ("99999", "0", None, 8192),
        ("4096", "4000", "anon 100\ninactive_file 2000\nactive_file 900\n", 2996),
        ("4096", "4000", "inactive_file 9\ntotal_inactive_file 2000\ntotal_active_file 0\n", 2096),
        ("4096", "1024", "inactive_file 9999\nactive_file 0\n", 4096),
        ("4096", "1024", "inactive_file many\n", 3072),
        ("4096", "1024", "?", 3072),
    ],
)
def test_a_container_has_no_more_memory_than_its_limit_leaves(
    monkeypatch, tmp_path, limit, taken, parts, expected
) -> None:
    """`/proc/meminfo` is the host's there. Files that were read count as taken, but can go."""
    texts = {"max": limit, "current": taken, "stat": parts, "meminfo": "MemAvailable: 8 kB"}
    for name, text in texts.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    paths = tuple(str(tmp_path / name) for name in ("max", "current", "stat"))
    monkeypatch.setattr(worker_module, "_LIMITS", (paths, ("no", "such", "file")))

    assert _available_bytes(str(tmp_path / "meminfo")) == expected


class FakeCuda:
    """Streams that run at once and events that complete when told; records the order of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_done = False
        calls, fake = self.calls, self

        class Stream:
            def __init__(self, device: Any = None) -> None: ...
            def wait_stream(self, other: Any) -> None:
                calls.append("wait for compute")

            def synchronize(self) -> None:
                calls.append("synchronize")

        class Event:
            def __init__(self, enable_timing: bool = False) -> None: ...
            def record(self, stream: Any) -> None:
                calls.append("record")

            def query(self) -> bool:
                return fake.is_done

            def elapsed_time(self, other: Any) -> float:
                return 4.0

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: Any) -> str:
        return "compute"

    def stream(self, stream: Any) -> Any:
        import contextlib

        return contextlib.nullcontext()


def test_streams_wait_for_compute_and_report_after_their_event() -> None:
    """The order of calls only: what a device makes of it is for `make test-gpu`."""
    cuda = FakeCuda()
    transfers = StreamTransfers(torch.device("cpu"), cuda)
    transfers.submit(save_job(1, [1], (0,)), lambda job: cuda.calls.append("copy"))
    early = transfers.poll()
    cuda.is_done = True
    (ended,) = transfers.poll()

    assert cuda.calls == ["wait for compute", "record", "copy", "record"]
    assert early == []
    assert (ended.error, ended.elapsed_s) == (None, 0.004)


def test_an_error_while_queueing_is_reported_after_what_was_queued() -> None:
    cuda = FakeCuda()
    transfers = StreamTransfers(torch.device("cpu"), cuda)

    def fail(job: Job) -> None:
        raise RuntimeError("out of memory")

    transfers.submit(load_job(1, [1], (0,)), fail)
    early = transfers.poll()
    cuda.is_done = True
    (ended,) = transfers.poll()

    assert early == []
    assert isinstance(ended.error, RuntimeError)
