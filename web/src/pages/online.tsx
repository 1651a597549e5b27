export function OnlinePage() { return null; }
