#!/usr/bin/env bash
echo basil > note.txt
