from meshwright.batching.pages import PagePool


def test_pages_of_an_idle_prefix_are_room():
    pool = PagePool(10)
    pool.take(6)
    pool.keep(1, 4)
    assert (pool.room, pool.kept(1)) == (4, 4)
    pool.unpin(1)
    assert (pool.room, pool.num_free, pool.room_beside(1), pool.room_beside(None)) == (8, 4, 4, 8)
    pool.pin(1, 4)
    assert pool.room == 4


def test_the_prefix_that_is_idle_longest_is_evicted_first():
    pool = PagePool(6)
    for prefix in (1, 2, 3):
        pool.take(2)
        pool.keep(prefix, 2)
    for prefix in (2, 1):
        pool.unpin(prefix)
    pool.take(1)
    assert [pool.kept(prefix) for prefix in (1, 2, 3)] == [2, 0, 2]
    pool.take(3)
    assert (pool.kept(1), pool.kept(3), pool.room) == (0, 2, 0)
