export function TrainingPage() { return null; }
