// What the page does beyond plain HTML: live fragments, running clocks, questions before what destroys.
import { startClocks, tick } from "./clocks.js";
import { startAsking } from "./confirm.js";
import { startBulk } from "./bulk.js";
import { startLive } from "./live.js";

startClocks();
startAsking();
startBulk();
startLive(tick);
