// What the page does beyond plain HTML: live fragments, running clocks, questions before what destroys, theme.
import { startClocks, tick } from "./clocks.js";
import { startAsking } from "./confirm.js";
import { startBulk } from "./bulk.js";
import { startLive } from "./live.js";
import { startTheme } from "./theming.js";

startClocks();
startTheme();
startAsking();
startBulk();
startLive(tick);
