/** Keys of the whole page, and the dialog that lists them. */
import { Button, Kbd } from "@mantine/core";
import { useEffect, useRef } from "react";

type Handler = () => boolean | void;

const stack: Map<string, Handler>[] = [];

function pressed(event: KeyboardEvent) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const target = event.target as HTMLElement | null;
  const typing = target?.closest("input, textarea, select, [contenteditable]");
  if (document.querySelector("dialog[open]")) return;
  if (typing) {
    if (event.key === "Escape") (target as HTMLElement).blur();
    return;
  }
  for (let at = stack.length - 1; at >= 0; at--) {
    const handler = stack[at]?.get(event.key);
    if (handler && handler() !== false) {
      event.preventDefault();
      return;
    }
  }
}

addEventListener("keydown", pressed);

/** Keys while a component is shown. A handler that returns false leaves the key to others. */
export function useKeys(keys: Record<string, Handler>) {
  const newest = useRef(keys);
  newest.current = keys;
  const names = Object.keys(keys).join(" ");
  useEffect(() => {
    const mine = new Map<string, Handler>();
    for (const name of names.split(" ")) mine.set(name, () => newest.current[name]?.());
    stack.push(mine);
    return () => void stack.splice(stack.indexOf(mine), 1);
  }, [names]);
}

const HELP: [string[], string][] = [
  [["j", "k"], "Next or previous row, turn or token window"],
  [["Enter"], "Open the chosen row"],
  [["/"], "Filter this list, or search the transcripts"],
  [["Escape"], "Leave a field, or go up one page"],
  [["n", "p"], "Next or previous episode of the list"],
  [["[", "]"], "Previous or next screenshot"],
  [["t"], "Switch between system, light and dark"],
  [["?"], "This list"],
];

export function KeyHelp({ open, close }: { open: boolean; close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open && !dialog.current?.open) dialog.current?.showModal();
    if (!open) dialog.current?.close();
  }, [open]);
  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="keys-title">
      <h2 id="keys-title">Keyboard</h2>
      <div className="keys">
        {HELP.map(([keys, about]) => (
          <div key={about} style={{ display: "contents" }}>
            <div>
              {keys.map((key) => (
                <span key={key}>
                  <Kbd size="xs">{key}</Kbd>{" "}
                </span>
              ))}
            </div>
            <div>{about}</div>
          </div>
        ))}
      </div>
      <div className="actions" style={{ marginTop: 16, justifyContent: "flex-end" }}>
        <Button size="xs" variant="default" onClick={close}>
          Close
        </Button>
      </div>
    </dialog>
  );
}
