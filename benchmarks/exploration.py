"""MountainCar by every kind of exploration: the reward says nothing until the goal is found."""

from benchmarks.grid import Cell, Grid, main

NO_BONUS = "algo.bonus.type=off"
WAYS: dict[str, tuple[str, ...]] = {
    "count bonus": (),
    "falling epsilon": (NO_BONUS,),
    "ladder of epsilons": (NO_BONUS, "algo.explore.type=ladder"),
    "softmax": (NO_BONUS, "algo.explore.type=softmax"),
    "noisy nets": (NO_BONUS, "net.noisy=true", "algo.explore.type=constant", "algo.explore.epsilon=0"),
}
GRID = Grid(
    "exploration",
    "MountainCar by every kind of exploration",
    tuple(
        Cell("MountainCar-v0", "mountaincar", None, settings, title=f"MountainCar-v0, {name}")
        for name, settings in WAYS.items()
    ),
    seeds=3,
    columns=3,
    notes="An episode without the goal scores -200.",
)

if __name__ == "__main__":
    main(GRID, __doc__)
