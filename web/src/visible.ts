/** Escape control, direction and invisible format characters, as `clawgym.visible` does. Newlines and tabs stay. */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|[\ud800-\udfff]/gu;

export function visible(text: string): string {
  return text.replace(HIDDEN, (found) => {
    const code = found.codePointAt(0) ?? 0;
    if (code > 0xffff) return "\\U" + code.toString(16).padStart(8, "0");
    return code > 0xff ? "\\u" + code.toString(16).padStart(4, "0") : "\\x" + code.toString(16).padStart(2, "0");
  });
}
