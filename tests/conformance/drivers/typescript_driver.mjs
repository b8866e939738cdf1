// Runs where npm's @deeplethe/forkd is installed: reads calls as lines of JSON, makes them, writes what came of each.
import { createInterface } from "node:readline";
import { Controller, ControllerError, Sandbox } from "@deeplethe/forkd";

const objects = { Controller, Sandbox };

function find(path) {
  let owner;
  let found = objects[path[0]];
  for (const name of path.slice(1)) [owner, found] = [found, found[name]];
  return { owner, found };
}

async function make(call) {
  const { owner, found } = find(call.path);
  const args = call.args ?? [];
  if (call.names) return Object.getOwnPropertyNames(found.prototype).filter((name) => name !== "constructor").sort();
  if (call.within) {
    return await found.call(owner, ...args, async (sandbox) => ({
      id: sandbox.id,
      result: await sandbox[call.within.method](...call.within.args),
    }));
  }
  const result = call.construct ? new found(...args) : await found.call(owner, ...args);
  if (call.keep === undefined) return result;
  objects[call.keep] = result;
  return { id: result.id, info: result.info };
}

async function answer(call) {
  try {
    return { result: (await make(call)) ?? null };
  } catch (error) {
    const described = { type: error.constructor.name, message: error.message };
    if (error instanceof ControllerError) {
      Object.assign(described, { status: error.status, body: error.body, url: error.url });
    }
    return { error: described };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(JSON.stringify(await answer(JSON.parse(line))) + "\n");
}
