"""Scripts for robot arms as data: what is where in a scene, the steps of a task, and the tasks that have a script."""
