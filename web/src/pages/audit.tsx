export function AttackPage() { return null; }
export function AuditPage() { return null; }
